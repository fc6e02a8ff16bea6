// A device that has the CPU's memory and kernels, and the rules of a GPU.
//
// An operation on it runs as the CPU's kernel on host tensors that alias the same memory. Around that this file refuses what a GPU
// refuses (tensors of two devices, a generator of the host, products of integers), counts what a GPU pays for (launches, transfers,
// waits), and rounds float32 products to TensorFloat-32 while torch allows it. Addresses are marked, so that host code that follows
// one crashes.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <map>
#include <set>
#include <unordered_map>

using at::Tensor;
using c10::DispatchKey, c10::DispatchKeySet, c10::IValue, c10::OperatorHandle, c10::Storage, c10::TensorImpl;
using Stack = torch::jit::Stack;

namespace {

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);
const DispatchKeySet kKeys(DispatchKey::PrivateUse1);

// ---- counting ---------------------------------------------------------------------------------------------------------------

std::mutex lock;
std::map<std::string, int64_t> events;
py::object listener = py::none();  // called with (kind, operation) at each wait and transfer

void note(const char* kind, const std::string& operation) {
  {
    std::lock_guard<std::mutex> hold(lock);
    ++events[kind];
  }
  if (std::string(kind) != "launch") {
    py::gil_scoped_acquire gil;
    if (!listener.is_none()) listener(kind, operation);
  }
}

// ---- memory -----------------------------------------------------------------------------------------------------------------

size_t limit = size_t(8) << 30, in_use = 0, most = 0;
constexpr uintptr_t kMark = uintptr_t(1) << 62;  // no address of the host has this bit

void* marked(void* p) { return p ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(p) | kMark) : nullptr; }
void* plain(const void* p) { return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(p) & ~kMark); }

Storage host_storage(size_t bytes) { return Storage(Storage::use_byte_size_t(), bytes, at::getCPUAllocator(), true); }

// The device's pointer to memory that the host has allocated, which it keeps alive.
c10::DataPtr taken_over(Storage memory) {
  struct Owner { Storage memory; size_t bytes; };
  const size_t bytes = memory.nbytes();
  {
    std::lock_guard<std::mutex> hold(lock);
    TORCH_CHECK_WITH(OutOfMemoryError, in_use + bytes <= limit, "pretended device out of memory: ", bytes, " bytes asked for, ",
                     limit - in_use, " of ", limit, " free");
    in_use += bytes;
    most = std::max(most, in_use);
  }
  void* address = marked(memory.mutable_data());
  return {address, new Owner{std::move(memory), bytes}, [](void* context) {
            auto* owner = static_cast<Owner*>(context);
            { std::lock_guard<std::mutex> hold(lock); in_use -= owner->bytes; }
            delete owner;
          }, kDevice};
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return taken_over(host_storage(bytes)); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(plain(to), plain(from), bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { most = in_use; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {limit - in_use, limit}; }
} device_memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory);

// ---- one device, one stream, its generator -----------------------------------------------------------------------------------

struct OneDevice final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { note("wait", "stream"); }
  void synchronizeDevice(c10::DeviceIndex) const override { note("wait", "device"); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, OneDevice);

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(at::Generator host) : GeneratorImpl(kDevice, kKeys), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  void set_state(const TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  static c10::DeviceType device_type() { return kDevice.type(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(host.clone()); }
  at::Generator host;
};

at::Generator new_generator() { return at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator()); }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator generator = new_generator();
    return generator;
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    Storage larger = host_storage(bytes);
    if (const size_t same = std::min(bytes, storage.nbytes())) std::memcpy(larger.mutable_data(), plain(storage.data()), same);
    storage.set_data_ptr_noswap(taken_over(std::move(larger)));
    storage.set_nbytes(bytes);
  }
} hooks;

// ---- operations -------------------------------------------------------------------------------------------------------------

void copy_layout(const Tensor& from, const Tensor& to) {
  to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

bool is_one_of(const std::string& name, std::initializer_list<const char*> names) {
  return std::any_of(names.begin(), names.end(), [&](const char* other) { return name == other; });
}

Tensor rounded_to_tf32(const Tensor& x) {  // 10 bits of the mantissa, to nearest even
  auto bits = x.clone().view(at::kInt);
  return bits.add_(0xfff + bits.bitwise_right_shift(13).bitwise_and(1)).bitwise_and_(~0x1fff).view(at::kFloat);
}

class Call {  // of one operation: which host tensor stands for which tensor of the device
 public:
  explicit Call(const OperatorHandle& op) : op_(op), full_(c10::toString(op.operator_name())) {
    name_ = op.schema().name().substr(op.schema().name().find("::") + 2);
  }

  Tensor on_host(const Tensor& x, bool writes, size_t argument) {
    if (!x.defined()) return x;
    if (!x.is_privateuseone()) {
      refuse_unless_scalar(x, writes);
      return x;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(x.layout() == at::kStrided, full_, ": the pretended device has dense tensors only");
    TORCH_CHECK_NOT_IMPLEMENTED(!at::isIntegralType(x.scalar_type(), true) || !is_one_of(name_, {"mm", "bmm", "addmm", "addmv", "baddbmm", "dot", "mv"}),
                                "\"", name_, "\" not implemented for '", x.scalar_type(), "', as on a GPU");
    Storage& memory = hosts_[x.storage().unsafeGetStorageImpl()];
    if (!memory) {
      memory = Storage(Storage::use_byte_size_t(), x.storage().nbytes(), at::DataPtr(plain(x.storage().data()), at::kCPU), at::getCPUAllocator(), true);
      owners_[memory.unsafeGetStorageImpl()] = x;
    }
    Tensor host = at::detail::make_tensor<TensorImpl>(Storage(memory), DispatchKeySet(DispatchKey::CPU), x.dtype());
    copy_layout(x, host);
    pairs_[host.unsafeGetTensorImpl()] = {host, x};
    if (writes) written_.emplace_back(x, host);
    return !writes && reads_tf32(argument) && x.scalar_type() == at::kFloat ? rounded_to_tf32(host) : host;
  }

  Tensor on_device(const Tensor& x) {
    if (!x.defined() || x.is_privateuseone()) return x;
    if (auto pair = pairs_.find(x.unsafeGetTensorImpl()); pair != pairs_.end()) return pair->second.second;
    Tensor& owner = owners_[x.storage().unsafeGetStorageImpl()];
    Tensor result;
    if (owner.defined()) {
      result = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, Storage(owner.storage()), owner.key_set(), x.dtype());
    } else {
      Storage memory(Storage::use_byte_size_t(), x.storage().nbytes(), taken_over(x.storage()), &device_memory, true);
      result = owner = at::detail::make_tensor<TensorImpl>(std::move(memory), kKeys, x.dtype());
    }
    copy_layout(x, result);
    return result;
  }

  void follow_resizes() {
    for (auto& [device, host] : written_) {
      if (host.storage().data() != plain(device.storage().data())) {
        device.storage().set_data_ptr_noswap(taken_over(host.storage()));
        device.storage().set_nbytes(host.storage().nbytes());
      }
      if (device.sizes() != host.sizes() || device.strides() != host.strides() || device.storage_offset() != host.storage_offset())
        device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  const std::string& full() const { return full_; }

 private:
  // A GPU reads a host tensor of one number in entrywise operations, and host indices; nothing else.
  void refuse_unless_scalar(const Tensor& x, bool writes) const {
    const bool index = name_ == "index" || name_.find("index_put") != name_.npos || name_ == "_index_put_impl_";
    const bool entrywise = op_.hasTag(at::Tag::pointwise) || name_.find("fill") != name_.npos || name_ == "floor_divide" || index;
    const bool scalar = x.dim() == 0 && (entrywise || x.unsafeGetTensorImpl()->is_wrapped_number());
    TORCH_CHECK(!writes && (scalar || (index && at::isIntegralType(x.scalar_type(), true))),
                "Expected all tensors to be on the same device, but found at least two devices, ", kDevice, " and ", x.device(), "! (", full_, ")");
  }

  bool reads_tf32(size_t argument) const {
    if (name_.find("convolution") == 0) return at::globalContext().allowTF32CuDNN() && argument < (name_.find("backward") == name_.npos ? 2 : 3);
    if (at::globalContext().float32MatmulPrecision() == at::Float32MatmulPrecision::HIGHEST) return false;
    return is_one_of(name_, {"mm", "bmm"}) ? argument < 2 : is_one_of(name_, {"addmm", "baddbmm"}) && (argument == 1 || argument == 2);
  }

  const OperatorHandle& op_;
  std::string full_, name_;
  std::unordered_map<c10::StorageImpl*, Storage> hosts_;
  std::unordered_map<c10::StorageImpl*, Tensor> owners_;
  std::unordered_map<TensorImpl*, std::pair<Tensor, Tensor>> pairs_;
  std::vector<std::pair<Tensor, Tensor>> written_;
};

template <class F>
IValue with_tensors(const IValue& value, const F& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> all;
    for (const Tensor& x : value.toTensorList()) all.push_back(f(x));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> all;
    for (const std::optional<Tensor>& x : value.toOptionalTensorList()) all.push_back(x ? std::optional<Tensor>(f(*x)) : std::nullopt);
    return all;
  }
  return value;
}

// Runs `kernel`, an operation of the CPU, in the place of `op`.
void run_as(const OperatorHandle& op, const OperatorHandle& kernel, Stack* stack) {
  const auto& arguments = kernel.schema().arguments();
  Call call(op);
  bool writes_any = false, is_view = false;
  for (size_t k = 0; k < arguments.size(); ++k) {
    IValue& value = torch::jit::peek(*stack, k, arguments.size());
    const auto* alias = arguments[k].alias_info();
    const bool writes = alias && alias->isWrite();
    writes_any |= writes;
    is_view |= alias && !writes;
    value = with_tensors(value, [&](const Tensor& x) { return call.on_host(x, writes, k); });
    if (value.isDevice()) value = c10::Device(at::kCPU);
    if (arguments[k].type()->str() == "Generator?") {
      const at::Generator given = value.isNone() ? hooks.getDefaultGenerator(0) : value.toGenerator();
      TORCH_CHECK(given.device() == kDevice, "Expected a '", kDevice, "' device type for generator but found '", given.device(), "'");
      value = at::check_generator<DeviceGenerator>(given)->host;
    }
  }
  const bool reads_number = call.full() == "aten::_local_scalar_dense";
  if (!reads_number && (writes_any || !is_view)) note("launch", call.full());
  if (op.hasTag(at::Tag::data_dependent_output) || (op.hasTag(at::Tag::dynamic_output_shape) && call.full().find("aten::index") != 0))
    note("wait", call.full());
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    kernel.callBoxed(stack);
  }
  call.follow_resizes();
  for (size_t k = 0; k < kernel.schema().returns().size(); ++k) {
    IValue& value = torch::jit::peek(*stack, k, kernel.schema().returns().size());
    value = with_tensors(value, [&](const Tensor& x) { return call.on_device(x); });
  }
}

void fallback(const OperatorHandle& op, Stack* stack) { run_as(op, op, stack); }

const OperatorHandle& find(const char* name) {
  static std::map<std::string, OperatorHandle> known;
  return known.try_emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first->second;
}

void convolution(const OperatorHandle& op, Stack* stack) { run_as(op, find("aten::convolution"), stack); }

void convolution_backward(const OperatorHandle& op, Stack* stack) {
  const Tensor weight = (stack->end() - 8)->toTensor();
  const bool transposed = (stack->end() - 4)->toBool();
  const int64_t width = transposed ? weight.size(1) * (stack->end() - 2)->toInt() : weight.size(0);
  stack->insert(stack->end() - 7, IValue(std::vector<int64_t>{width}));  // the size of the bias, which this name leaves out
  run_as(op, find("aten::convolution_backward"), stack);
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_memory, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_memory, kKeys, c10::dtype_or_default(dtype));
}

Tensor zero_tensor(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
                   std::optional<bool>) {
  return at::detail::empty_generic(size, &device_memory, kKeys.add(DispatchKey::ZeroTensor), c10::dtype_or_default(dtype), std::nullopt);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Call call(find("aten::copy_"));
  const bool reads = from.is_privateuseone(), writes = to.is_privateuseone();
  note(reads && writes ? "launch" : reads ? "to host" : "to device", "copy");
  if (!writes && !non_blocking) note("wait", "copy to the host");
  Tensor source = reads ? call.on_host(from, false, 0) : from, target = writes ? call.on_host(to, true, 0) : to;
  if (reads) source._set_conj(from.is_conj()), source._set_neg(from.is_neg());
  if (writes) target._set_conj(to.is_conj()), target._set_neg(to.is_neg());
  target.copy_(source);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) { return copy_from(from, to.resize_(from.sizes()), false); }

Tensor& set_storage(Tensor& x, Storage memory, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto contiguous = c10::contiguous_strides(sizes);
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(memory));
  x.unsafeGetTensorImpl()->set_sizes_and_strides(
      sizes, stride.size() == size.size() ? C10_AS_INTARRAYREF_SLOW(stride) : c10::IntArrayRef(contiguous), offset.expect_int());
  return x;
}

Tensor& set_whole(Tensor& x, Storage memory) {
  const auto length = static_cast<int64_t>(memory.nbytes() / x.dtype().itemsize());
  return set_storage(x, std::move(memory), 0, {length}, {1});
}

Tensor& set_tensor(Tensor& x, const Tensor& y) { return set_storage(x, y.storage(), y.storage_offset(), y.sym_sizes(), y.sym_strides()); }

// Attention as CUDA computes it below float64: one kernel each way, and no derivative of the second
int64_t choose_attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>&, double, bool, std::optional<double>, bool grouped) {
  const bool fused = q.dim() == 4 && q.scalar_type() != at::kDouble && !grouped && at::globalContext().userEnabledMemEfficientSDP();
  return static_cast<int64_t>(fused ? at::SDPBackend::efficient_attention : at::SDPBackend::math);
}

Tensor scores(const Tensor& q, const Tensor& k, const std::optional<Tensor>& bias, bool causal, std::optional<double> scale) {
  Tensor z = at::matmul(q, k.mT()) * scale.value_or(1 / std::sqrt(double(q.size(-1))));
  if (causal) z = z.masked_fill(at::ones_like(z, at::kBool).triu(1), -INFINITY);
  return bias && bias->defined() ? z + *bias : z;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias, bool,
                                                     double, bool causal, std::optional<double> scale) {
  const Tensor z = scores(q, k, bias, causal, scale), seed = at::zeros({}, q.options().dtype(at::kLong));
  return {at::matmul(at::softmax(z, -1), v), at::logsumexp(z, {-1}), seed, seed.clone()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const Tensor& g, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias,
    const Tensor& out, const Tensor& logsumexp, const Tensor&, const Tensor&, double, std::array<bool, 4> wanted, bool causal, std::optional<double> scale) {
  const Tensor p = (scores(q, k, bias, causal, scale) - logsumexp.unsqueeze(-1)).exp();
  const Tensor d = p * (at::matmul(g, v.mT()) - (g * out).sum(-1, true));
  const double s = scale.value_or(1 / std::sqrt(double(q.size(-1))));
  return {at::matmul(d, k) * s, at::matmul(d.mT(), q) * s, at::matmul(p.mT(), g),
          wanted[3] && bias.defined() ? at::sum_to(d, bias.sizes()) : Tensor()};
}

// Recurrent cells, of which a GPU has kernels of its own
using Bias = std::optional<Tensor>;

Tensor plus(const Tensor& x, const Bias& bias) { return bias && bias->defined() ? x + *bias : x; }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& x, const Tensor& h, const Tensor& c, const Bias& a, const Bias& b) {
  const auto gates = (plus(x, a) + plus(h, b)).chunk(4, 1);
  const Tensor next = gates[1].sigmoid() * c + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * next.tanh(), next, at::empty({0}, x.options())};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& x, const Tensor& h, const Tensor& before, const Bias& a, const Bias& b) {
  const auto in = plus(x, a).chunk(3, 1), of = plus(h, b).chunk(3, 1);
  const Tensor update = (in[1] + of[1]).sigmoid(), fresh = (in[2] + (in[0] + of[0]).sigmoid() * of[2]).tanh();
  return {fresh + update * (before - fresh), at::empty({0}, x.options())};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name : {"native_layer_norm", "native_group_norm", "addr", "mish_backward", "all.dims_out", "any.dims_out"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());  // which torch would decompose
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_efficientzerotensor", &zero_tensor);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  library.impl("_scaled_dot_product_efficient_attention", &attention);
  library.impl("_scaled_dot_product_efficient_attention_backward", &attention_backward);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
}

TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("counts", [] { std::lock_guard<std::mutex> hold(lock); return std::exchange(events, {}); });
  m.def("listen", [](py::object f) { listener = std::move(f); });
  m.def("set_limit", [](size_t bytes) { limit = bytes; });
  m.def("memory_allocated", [](const py::object&) { return in_use; }, py::arg("device") = py::none());
  m.def("max_memory_allocated", [](const py::object&) { return most; }, py::arg("device") = py::none());
  m.def("reset_peak_memory_stats", [](const py::object&) { most = in_use; }, py::arg("device") = py::none());
  m.def("mem_get_info", [](const py::object&) { return device_memory.getMemoryInfo(0); }, py::arg("device") = py::none());
  m.def("default_generator", [] { return hooks.getDefaultGenerator(0); });
}
