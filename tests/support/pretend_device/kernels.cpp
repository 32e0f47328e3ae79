// The kernels of the device: those that hold memory are its own, all others are the CPU's, on copies.
//
// As a kernel of a real device does, a kernel here asks for write access (mutable_data_ptr) where it writes and for nothing more than read
// access (const_data_ptr) where it reads: torch clears a copy-on-write mark at the one and keeps it at the other.

#include "pretend.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>

namespace {

using at::Tensor;
using pretend::PRETEND;
using MaybeTensor = std::optional<Tensor>;

// --- kernels: memory, copies and views -------------------------------------------------------------------------------------------

using Layout = std::optional<at::Layout>;
using Dtype = std::optional<at::ScalarType>;
using MaybeDevice = std::optional<c10::Device>;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Tensor empty(
    at::IntArrayRef size, Dtype dtype, Layout, MaybeDevice device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &pretend::allocator(), KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Dtype dtype, Layout, MaybeDevice device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &pretend::allocator(), KEYS, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

// A tensor of the CPU's on the memory at `data`, which is that of `tensor`.
Tensor on_host(const Tensor& tensor, const void* data) {
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
  auto host = at::from_blob(const_cast<void*>(data), tensor.sizes(), tensor.strides(), options);
  host = tensor.is_conj() ? host.conj() : host;
  return tensor.is_neg() ? at::_neg_view(host) : host;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (to.numel() != 0) {
    const c10::DeviceGuard guard(to.device().type() == PRETEND ? to.device() : from.device());
    // first: where both have the same marked memory, the one that is written moves away
    void* written = to.mutable_data_ptr();
    on_host(to, written).copy_(on_host(from, from.const_data_ptr()));
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  return at::_local_scalar_dense(on_host(self, self.const_data_ptr()));
}

// As CUDA's kernels for lists of tensors do: it hands the addresses on and does not ask for write access.
void foreach_add_by_address(at::TensorList self, const at::Scalar& scalar) {
  for (const auto& tensor : self) {
    const c10::DeviceGuard guard(tensor.device());
    on_host(tensor, tensor.const_data_ptr()).add_(scalar);
  }
}

// --- kernels: the CPU's ----------------------------------------------------------------------------------------------------------

// The device that an op runs on; an error as on a real device where its tensors are on several. A list may be on several, and integers,
// such as lengths and indices, may stay on the CPU.
c10::Device device_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& name = op.schema().name();
  const auto* const where = ": Expected all tensors to be on the same device, but found ";
  MaybeDevice found;
  const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
  for (const auto& value : arguments) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == PRETEND) {
      const auto device = value.toTensor().device();
      TORCH_CHECK(!found || *found == device, name, where, *found, " and ", device);
      found = device;
    } else if (value.isTensorList() && !found) {
      for (const auto& tensor : value.toTensorVector()) {
        found = tensor.defined() ? MaybeDevice(tensor.device()) : found;
      }
    }
  }
  for (const auto& value : arguments) {
    const bool on_cpu = found && value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu();
    const bool refused = on_cpu && value.toTensor().dim() > 0 && !at::isIntegralType(value.toTensor().scalar_type(), true);
    TORCH_CHECK(!refused, name, where, *found, " and cpu");
  }
  return found && found->type() == PRETEND ? *found : pretend::current_device();
}

// The CPU's default generator is in the state of the device's inside, for ops that are not told which generator to use. Threads that draw
// from the CPU's meanwhile draw from the same.
struct DrawsOfTheDevice {
  at::Generator host = at::detail::getDefaultCPUGenerator(), device;
  Tensor before = host.get_state();
  explicit DrawsOfTheDevice(c10::DeviceIndex index) : device(pretend::drawn_by(pretend::default_generator(index))) {
    host.set_state(device.get_state());
  }
  ~DrawsOfTheDevice() {
    device.set_state(host.get_state());
    host.set_state(before);
  }
};

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto device = device_of(op, *stack);
  const c10::DeviceGuard guard(device);
  std::optional<DrawsOfTheDevice> draws;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    draws.emplace(device.index());
  }
  const auto count = op.schema().arguments().size();
  for (size_t at = stack->size() - count; at < stack->size(); ++at) {
    auto& value = (*stack)[at];
    if (value.isGenerator() && value.toGenerator().device().type() == PRETEND) {
      const auto generator = value.toGenerator();
      const bool is_default = generator == pretend::default_generator(generator.device().index());
      value = is_default ? c10::IValue() : c10::IValue(pretend::drawn_by(generator));
    }
  }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

// torch has no kernel of the CPU's for these: other devices bring their own.

Tensor maybe_to(const MaybeTensor& tensor, c10::Device device) {
  return tensor.has_value() && tensor->defined() ? tensor->to(device) : Tensor();
}

Tensor convolution(
    const Tensor& x, const Tensor& weight, const MaybeTensor& bias, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  const auto on_cpu = maybe_to(bias, c10::kCPU);
  return at::convolution(x.cpu(), weight.cpu(), on_cpu, stride, padding, dilation, transposed, output_padding, groups).to(x.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& x, const Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  const std::array<int64_t, 1> bias_size = {gradient.size(1)};
  auto [dx, dweight, dbias] = at::convolution_backward(
      gradient.cpu(), x.cpu(), weight.cpu(), bias_size, stride, padding, dilation, transposed, output_padding, groups, wanted);
  return {maybe_to(dx, x.device()), maybe_to(dweight, x.device()), maybe_to(dbias, x.device())};
}

// Writes into the running statistics, of which its schema says nothing; that of _native_batch_norm_legit does.
std::tuple<Tensor, Tensor, Tensor> batch_norm(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& mean, const MaybeTensor& variance,
    bool training, double momentum, double epsilon) {
  if (mean.has_value() && mean->defined()) {
    auto written_mean = training ? *mean : mean->clone(), written_variance = training ? *variance : variance->clone();
    return at::_native_batch_norm_legit(x, weight, bias, written_mean, written_variance, training, momentum, epsilon);
  }
  return at::_native_batch_norm_legit(x, weight, bias, training, momentum, epsilon);
}

Tensor with_bias(const Tensor& gates, const MaybeTensor& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& from_x, const Tensor& from_h, const Tensor& cx, const MaybeTensor& bias_x, const MaybeTensor& bias_h) {
  const auto gates = (with_bias(from_h, bias_h) + with_bias(from_x, bias_x)).chunk(4, 1);
  const auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  const auto cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const MaybeTensor& of_hy, const MaybeTensor& of_cy, const Tensor& cx, const Tensor& cy, const Tensor& saved, bool has_bias) {
  const auto gates = saved.chunk(4, 1);
  const auto &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  const auto dhy = of_hy.has_value() && of_hy->defined() ? *of_hy : at::zeros_like(cy);
  const auto through_h = dhy * o * (1 - cy.tanh().square());
  const auto dc = of_cy.has_value() && of_cy->defined() ? through_h + *of_cy : through_h;
  const auto dgates = at::cat(
      {dc * g * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - g.square()), dhy * cy.tanh() * o * (1 - o)}, 1);
  return {dgates, dc * f, has_bias ? dgates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& from_x, const Tensor& from_h, const Tensor& hx, const MaybeTensor& bias_x, const MaybeTensor& bias_h) {
  const auto x = with_bias(from_x, bias_x).chunk(3, 1), h = with_bias(from_h, bias_h).chunk(3, 1);
  const auto r = (h[0] + x[0]).sigmoid(), z = (h[1] + x[1]).sigmoid(), n = (x[2] + r * h[2]).tanh();
  return {(hx - n) * z + n, at::cat({r, z, n, hx, h[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& gradient, const Tensor& saved, bool has_bias) {
  const auto parts = saved.chunk(5, 1);
  const auto &r = parts[0], &z = parts[1], &n = parts[2], &hx = parts[3], &h = parts[4];
  const auto dn = gradient * (1 - z) * (1 - n.square()), dr = dn * h * r * (1 - r), dz = gradient * (hx - n) * z * (1 - z);
  const auto dx = at::cat({dr, dz, dn}, 1), dh = at::cat({dr, dz, dn * r}, 1);
  return {dx, dh, gradient * z, has_bias ? dx.sum(0) : Tensor(), has_bias ? dh.sum(0) : Tensor()};
}

// --- registrations ---------------------------------------------------------------------------------------------------------------

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

// Tensors that are to be read as conjugated or negated: torch would resolve that by a copy, which comes here for it, and so on.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("_foreach_add_.Scalar", foreach_add_by_address);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_", at::native::set_cpu_);
  m.impl("set_.source_Storage", TORCH_FN(static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_)));
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("native_batch_norm", batch_norm);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  // torch would decompose these for a device without a kernel of its own, into ops that round otherwise
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

} // namespace
