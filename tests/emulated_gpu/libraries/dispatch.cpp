// Compute torch's CUDA operations with its CPU kernels on the same memory, after what the current stream waits for.
//
// Tensors on a GPU are seen as tensors of the CPU (`on_host`), the kernel is called, and new results are put into a
// GPU's memory. Operations without a CPU kernel fail by name: those of emulation/attention.py are computed there.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cstring>
#include <cuda_runtime_api.h>
#include <set>
#include <torch/library.h>

extern "C" void emulated_wait_stream(void *stream);
extern "C" void emulated_host_waits();

using c10::Device;
using c10::IValue;
using Names = std::set<std::string>;

// May mix tensors of the CPU and of GPUs.
static const Names MIXED = {
    "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::_to_copy", "aten::index.Tensor",
    "aten::index.Tensor_out", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put", "aten::_fused_adamw_"};
// The size of the result depends on values, for which the host waits.
static const Names WAITING = {
    "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::unique_dim", "aten::_unique2",
    "aten::unique_consecutive", "aten::repeat_interleave.Tensor", "aten::bincount"};
// torch's own code for CUDA works on the emulated runtime, or attention.py computes them.
static const Names LEFT = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::resize_", "aten::_resize_output_", "aten::as_strided_",
    "aten::set_", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory", "aten::_local_scalar_dense",
    "aten::lift", "aten::lift_fresh", "aten::_fused_sdp_choice", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_backward", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_efficient_attention_backward", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward", "aten::_flash_attention_forward",
    "aten::_flash_attention_backward", "aten::_efficient_attention_forward", "aten::_efficient_attention_backward"};

static std::string name_of(const c10::OperatorName &name) {
    return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

static at::Tensor on_host(const at::Tensor &tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    auto seen = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
    seen._set_conj(tensor.is_conj());
    seen._set_neg(tensor.is_neg());
    return seen;
}

static at::Tensor on_gpu(const at::Tensor &tensor, Device device) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    c10::cuda::CUDAGuard guard(device);
    auto dense = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
    auto moved = at::empty_strided(dense.sizes(), dense.strides(), dense.options().device(device));
    if (dense.numel()) std::memcpy(moved.data_ptr(), dense.data_ptr(), dense.numel() * dense.element_size());
    return moved;
}

template <class Function> static void for_each_tensor(const IValue &value, Function see) {
    if (value.isTensor()) see(value.toTensor());
    else if (value.isList())
        for (const IValue &element : value.toListRef())
            if (element.isTensor()) see(element.toTensor());
}

// The GPU of an operation. Refuses tensors of several devices, as CUDA's kernels do.
static Device device_of(const std::string &name, const std::vector<IValue> &arguments) {
    std::optional<Device> device;
    bool has_host_tensor = false;
    auto refuse = [&](const std::string &other) {
        TORCH_CHECK(MIXED.count(name), "Expected all tensors to be on the same device, but found at least two devices, ",
                    *device, " and ", other, "! (", name, " on an emulated GPU)");
    };
    auto see = [&](const at::Tensor &tensor) {
        if (!tensor.defined()) return;
        TORCH_CHECK(tensor.layout() == at::kStrided, name, " with a tensor that is not strided is not emulated");
        if (tensor.is_cuda() && !device) device = tensor.device();
        else if (tensor.is_cuda() && *device != tensor.device() && tensor.dim() > 0) refuse(tensor.device().str());
        has_host_tensor |= tensor.device().is_cpu() && tensor.dim() > 0 && tensor.numel() > 0;
    };
    for (const auto &argument : arguments) {
        for_each_tensor(argument, see);
        if (argument.isDevice() && argument.toDevice().is_cuda() && !device) device = argument.toDevice();
    }
    if (has_host_tensor && device) refuse("cpu");
    if (!device || device->index() < 0) device = Device(c10::kCUDA, c10::cuda::current_device());
    return *device;
}

static IValue to_host(const IValue &value) {
    if (value.isTensor()) return on_host(value.toTensor());
    if (value.isTensorList()) {
        c10::List<at::Tensor> tensors;
        for (const at::Tensor &tensor : value.toTensorVector()) tensors.push_back(on_host(tensor));
        return tensors;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> tensors;
        for (const auto &tensor : value.toOptionalTensorVector())
            tensors.push_back(tensor ? std::make_optional(on_host(*tensor)) : std::nullopt);
        return tensors;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return Device(c10::kCPU);
    if (value.isGenerator()) return IValue(); // the CPU's
    return value;
}

static IValue to_gpu(const IValue &value, Device device) {
    if (value.isTensor()) return on_gpu(value.toTensor(), device);
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> tensors;
    for (const at::Tensor &tensor : value.toTensorVector()) tensors.push_back(on_gpu(tensor, device));
    return tensors;
}

// Copy as the emulated runtime does, when something waits for the stream: within GPUs, and from and to pinned memory.
static bool copy_late(const at::Tensor &to, const at::Tensor &from, bool non_blocking,
                      const c10::cuda::CUDAStream &stream) {
    bool is_plain = to.dtype() == from.dtype() && to.sizes() == from.sizes();
    is_plain = is_plain && to.is_contiguous() && from.is_contiguous();
    bool is_flagged = to.is_conj() || to.is_neg() || from.is_conj() || from.is_neg();
    if (!is_plain || is_flagged || !to.numel()) return false;
    bool crosses = to.is_cuda() != from.is_cuda();
    const auto &host = to.is_cuda() ? from : to;
    if (crosses ? !non_blocking || !host.is_pinned() : to.device() != from.device()) return false;
    cudaMemcpyAsync(to.data_ptr(), from.data_ptr(), to.nbytes(), cudaMemcpyDefault, stream.stream());
    if (crosses)
        at::getHostAllocator(at::kCUDA)->record_event(
            host.data_ptr(), host.storage().data_ptr().get_context(), stream.unwrap());
    return true;
}

static bool host_waits(const std::string &name, const std::vector<IValue> &arguments) {
    if (name != "aten::copy_") return WAITING.count(name) > 0;
    const auto &to = arguments[0].toTensor(), &from = arguments[1].toTensor();
    bool non_blocking = arguments[2].toBool();
    return to.is_cuda() != from.is_cuda() && (!non_blocking || (from.is_cuda() && !to.is_pinned()));
}

// What the CPU's kernel has resized or put elsewhere goes back to the tensors that it was to write to.
static void write_back(const c10::FunctionSchema &schema, const std::vector<IValue> &given,
                       const std::vector<IValue> &used) {
    for (size_t i = 0; i < given.size(); i++) {
        const auto *alias = schema.arguments()[i].alias_info();
        if (!alias || !alias->isWrite() || !given[i].isTensor()) continue;
        const auto &target = given[i].toTensor(), &written = used[i].toTensor();
        if (!target.defined() || !target.is_cuda()) continue;
        bool is_in_place = !written.numel() || written.data_ptr() == target.data_ptr();
        if (is_in_place && written.sizes() == target.sizes()) continue;
        target.resize_(written.sizes());
        if (written.numel()) on_host(target).copy_(written);
    }
}

// The argument that an in-place or out variant returns.
static const IValue *returned_argument(const c10::FunctionSchema &schema, size_t index,
                                       const std::vector<IValue> &given) {
    const auto *alias = schema.returns()[index].alias_info();
    if (!alias || !alias->isWrite()) return nullptr;
    for (size_t i = 0; i < given.size(); i++) {
        const auto *own = schema.arguments()[i].alias_info();
        if (own && own->isWrite() && own->beforeSets() == alias->beforeSets()) return &given[i];
    }
    return nullptr;
}

static void compute(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    const auto &schema = op.schema();
    const std::string name = name_of(op.operator_name());
    const std::vector<IValue> given(stack->end() - schema.arguments().size(), stack->end());
    const Device device = device_of(name, given);
    const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
    if (host_waits(name, given)) {
        c10::cuda::warn_or_error_on_sync();
        emulated_host_waits();
    }
    torch::jit::drop(*stack, given.size());
    c10::cuda::CUDAGuard on_device(device);
    if (name == "aten::copy_" && copy_late(given[0].toTensor(), given[1].toTensor(), given[2].toBool(), stream)) {
        stack->push_back(given[0]);
        return;
    }
    emulated_wait_stream(stream.stream());
    std::vector<IValue> used;
    for (const auto &value : given) used.push_back(to_host(value));
    torch::jit::Stack results(used);
    {
        at::AutoDispatchBelowADInplaceOrView guard;
        op.callBoxed(&results);
    }
    write_back(schema, given, used);
    for (size_t i = 0; i < schema.returns().size(); i++) {
        const IValue *argument = returned_argument(schema, i, given);
        stack->push_back(argument ? *argument : to_gpu(results[i], device));
    }
}

static void replace(const c10::OperatorName &name) {
    static auto *handles = new std::vector<c10::RegistrationHandleRAII>(); // kept to the process's end
    handles->push_back(c10::Dispatcher::singleton().registerImpl(
        name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&compute>(), std::nullopt, nullptr,
        "emulated GPU"));
}

static bool is_view(const c10::FunctionSchema &schema) {
    for (const auto &result : schema.returns())
        if (result.alias_info() && !result.alias_info()->isWrite()) return true;
    return false;
}

// Replace all of torch's CUDA kernels in this process.
extern "C" void emulated_replace_kernels() {
    auto &dispatcher = c10::Dispatcher::singleton();
    for (const auto &name : dispatcher.getAllOpNames()) {
        bool is_left = name.name.rfind("aten::", 0) != 0 || name.name == "aten::set_" || LEFT.count(name_of(name));
        auto op = is_left ? std::nullopt : dispatcher.findSchema(name);
        if (op && op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && !is_view(op->schema())) replace(name);
    }
    replace({"aten::copy_", ""});
    replace({"aten::_copy_from_and_resize", ""});
}
