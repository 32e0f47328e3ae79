// A device on the dispatch key PrivateUse1, for tests; __init__.py says what it is for. Here are its memory, its guard and its generators.

#include "pretend.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <unordered_set>

namespace {

using pretend::PRETEND;
constexpr c10::DeviceIndex DEVICES = 2;
thread_local c10::DeviceIndex current = 0;

c10::DeviceIndex checked(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < DEVICES, "pretend has the devices 0 to ", DEVICES - 1, ", not ", static_cast<int>(index));
  return index;
}

// --- memory --------------------------------------------------------------------------------------------------------------------

std::array<std::atomic<int64_t>, DEVICES> live{}, peak{}, allocations{};
constexpr size_t ALIGNMENT = 64;

// Stands in front of each block, which is all that the deleter is given: a context beside the address would make the memory one that
// torch does not mark.
struct Header {
  size_t size;
  c10::DeviceIndex device;
};
static_assert(sizeof(Header) <= ALIGNMENT);

void release(void* data) {
  if (data == nullptr) {
    return;
  }
  void* block = static_cast<char*>(data) - ALIGNMENT;
  const auto* header = static_cast<Header*>(block);
  live[header->device] -= static_cast<int64_t>(header->size);
  std::free(block);
}

struct PretendAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(PRETEND, current);
    if (size == 0) {
      return {nullptr, nullptr, &release, device};
    }
    void* block = nullptr;
    TORCH_CHECK(posix_memalign(&block, ALIGNMENT, size + ALIGNMENT) == 0, "pretend is out of memory: ", size, " bytes");
    *static_cast<Header*>(block) = {size, current};
    const int64_t now = live[current] += static_cast<int64_t>(size);
    int64_t before = peak[current];
    while (before < now && !peak[current].compare_exchange_weak(before, now)) {
    }
    ++allocations[current];
    void* data = static_cast<char*>(block) + ALIGNMENT;
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};
PretendAllocator memory;
REGISTER_ALLOCATOR(PRETEND, &memory)

// The host's memory that pin_memory() gives: which addresses are pinned is all that sets it apart.
// Never destroyed: tensors may be freed after the end of main().
auto& pinning = *new std::mutex;
auto& pinned = *new std::unordered_set<const void*>;

struct PinnedAllocator final : c10::Allocator {
  static void unpin(void* data) {
    const std::lock_guard<std::mutex> lock(pinning);
    pinned.erase(data);
    std::free(data);
  }
  c10::DataPtr allocate(size_t size) override {
    void* data = nullptr;
    TORCH_CHECK(size == 0 || posix_memalign(&data, ALIGNMENT, size) == 0, "out of memory: ", size, " bytes");
    const std::lock_guard<std::mutex> lock(pinning);
    pinned.insert(data);
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &unpin;
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};
PinnedAllocator pinned_allocator;

// --- the current device, streams and events --------------------------------------------------------------------------------------

// All work is done when a kernel returns: a stream has nothing to wait for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return PRETEND;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {PRETEND, current};
  }
  void setDevice(c10::Device device) const override {
    current = checked(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStream(device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return getStream(stream.device());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- random numbers --------------------------------------------------------------------------------------------------------------

// Draws what a generator of the CPU with the same seed draws.
struct PretendGenerator final : c10::GeneratorImpl {
  at::Generator drawn_by;
  PretendGenerator(c10::DeviceIndex device, at::Generator by)
      : GeneratorImpl({PRETEND, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), drawn_by(std::move(by)) {}
  void set_current_seed(uint64_t seed) override {
    drawn_by.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    drawn_by.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return drawn_by.get_offset();
  }
  uint64_t current_seed() const override {
    return drawn_by.current_seed();
  }
  uint64_t seed() override {
    return drawn_by.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    drawn_by.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return drawn_by.unsafeGetGeneratorImpl()->get_state();
  }
  PretendGenerator* clone_impl() const override {
    return new PretendGenerator(device_.index(), drawn_by.clone());
  }
};

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<PretendGenerator>(device < 0 ? current : checked(device), at::detail::createCPUGenerator());
}

} // namespace

c10::Allocator& pretend::allocator() {
  return memory;
}

c10::Device pretend::current_device() {
  return {PRETEND, current};
}

const at::Generator& pretend::default_generator(c10::DeviceIndex device) {
  static const std::array<at::Generator, DEVICES> generators = {new_generator(0), new_generator(1)};
  return generators[device < 0 ? current : checked(device)];
}

at::Generator& pretend::drawn_by(const at::Generator& generator) {
  return generator.get<PretendGenerator>()->drawn_by;
}

namespace {

// --- what torch asks a device for ------------------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    current = checked(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current, checked(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return pretend::default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
  bool isPinnedPtr(const void* data) const override {
    const std::lock_guard<std::mutex> lock(pinning);
    return pinned.count(data) != 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::DeviceGuard guard(storage.device());
    auto data = memory.allocate(size);
    if (const size_t kept = std::min(size, storage.nbytes())) {
      memory.copy_data(data.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));  // takes the place of marked memory too
    storage.set_nbytes(size);
  }
};

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("device_count", [] { return static_cast<int>(DEVICES); });
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("exchange_device", [](int device) { return static_cast<int>(hooks.exchangeDevice(static_cast<c10::DeviceIndex>(device))); });
  m.def("default_generator", [](int device) { return pretend::default_generator(static_cast<c10::DeviceIndex>(device)); });
  m.def("live", [](int device) { return live.at(device).load(); });
  m.def("peak", [](int device) { return peak.at(device).load(); });
  m.def("allocations", [](int device) { return allocations.at(device).load(); });
  m.def("reset_peak", [](int device) { peak.at(device) = live.at(device).load(); });
}
