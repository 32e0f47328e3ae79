#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

namespace pretend {

constexpr auto PRETEND = c10::DeviceType::PrivateUse1;

// Gives memory of the current device.
c10::Allocator& allocator();
c10::Device current_device();

// That of the current device where `device` is -1.
const at::Generator& default_generator(c10::DeviceIndex device);
// The generator of the CPU's that a generator of the device draws with.
at::Generator& drawn_by(const at::Generator& generator);

} // namespace pretend
