// A tape of operations of torch and of the kernels beside them, run one after the other without Python in between.
//
// An operation is called through torch's dispatcher, with the arguments that were laid out when it was added.

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

namespace {

using Stack = std::vector<c10::IValue>;
using Multiply = int (*)(int, const void*, const void*, void*, const int64_t*, int64_t);
using Lift = int (*)(int, const void* const*, const int64_t*, void*, int64_t, double*);

at::Tensor tensor(int64_t impl) {
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(reinterpret_cast<c10::TensorImpl*>(impl)));
}

// One value, written as its kind and what follows: see _KINDS in hessiankit/engine/replay.py.
c10::IValue value(const int64_t*& at) {
  switch (*at++) {
    case 1:
      return c10::IValue(*at++);
    case 2: {
      double found;
      std::memcpy(&found, at++, sizeof found);
      return c10::IValue(found);
    }
    case 3:
      return c10::IValue(*at++ != 0);
    case 4:
      return c10::IValue(tensor(*at++));
    case 5: {
      c10::List<int64_t> found;
      for (int64_t left = *at++; left > 0; --left) found.push_back(*at++);
      return c10::IValue(found);
    }
    case 6: {
      c10::List<at::Tensor> found;
      for (int64_t left = *at++; left > 0; --left) found.push_back(tensor(*at++));
      return c10::IValue(found);
    }
    case 7: {
      std::string found;
      for (int64_t left = *at++; left > 0; --left) found.push_back(char(*at++));
      return c10::IValue(found);
    }
    default:
      return c10::IValue();
  }
}

struct Step {
  std::optional<c10::OperatorHandle> operation;
  Stack arguments;
  std::vector<at::Tensor> outputs;  // what the results are copied to; none where the operation writes them itself
  Multiply multiply = nullptr;
  Lift lift = nullptr;
  int single = 0;
  bool many = false;  // enough work for several threads
  const void* const* pointers = nullptr;
  const int64_t* numbers = nullptr;
  double* skew = nullptr;
  at::Tensor into;  // of a sum; its memory is another in every run

  bool run(int64_t threads, Stack& stack) const {
    threads = many ? threads : 1;
    if (multiply) return multiply(single, pointers[0], pointers[1], const_cast<void*>(pointers[2]), numbers, threads) == 0;
    if (lift) {
      skew[0] = skew[1] = 0;
      return lift(single, pointers, numbers, into.data_ptr(), threads, skew) == 0;
    }
    stack = arguments;
    operation->callBoxed(stack);
    for (size_t k = 0; k < outputs.size(); ++k) {
      const at::Tensor& found = stack[k].toTensor();
      if (found.sizes() != outputs[k].sizes()) return false;
      outputs[k].copy_(found);
    }
    return true;
  }
};

using Tape = std::vector<Step>;

}  // namespace

extern "C" void* hessiankit_tape() { return new Tape(); }

extern "C" void hessiankit_tape_end(void* tape) { delete static_cast<Tape*>(tape); }

// Adds an operation with all its arguments, each written as value() reads it. Returns 1 where it cannot be called so.
extern "C" int hessiankit_tape_operation(void* tape, const char* name, const char* overload, const int64_t* arguments,
                                         const int64_t* outputs, int64_t count) {
  try {
    Step step;
    step.operation = c10::Dispatcher::singleton().findSchema({name, overload});
    if (!step.operation) return 1;
    for (const c10::Argument& argument : step.operation->schema().arguments()) {
      c10::IValue found = value(arguments);
      if (found.isScalar() && argument.type()->kind() == c10::TypeKind::TensorType)
        found = at::native::wrapped_scalar_tensor(found.toScalar());
      step.arguments.push_back(std::move(found));
    }
    for (int64_t k = 0; k < count; ++k) step.outputs.push_back(tensor(outputs[k]));
    static_cast<Tape*>(tape)->push_back(std::move(step));
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

// Add a product and a sum of the kernels; what they point to outlives the tape.
extern "C" void hessiankit_tape_product(void* tape, void* function, int single, int many, const void* const* pointers,
                                        const int64_t* numbers) {
  Step step;
  step.multiply = reinterpret_cast<Multiply>(function);
  step.single = single, step.many = many, step.pointers = pointers, step.numbers = numbers;
  static_cast<Tape*>(tape)->push_back(std::move(step));
}

extern "C" void hessiankit_tape_sum(void* tape, void* function, int single, int many, const void* const* pointers,
                                    const int64_t* numbers, int64_t into, double* skew) {
  Step step;
  step.lift = reinterpret_cast<Lift>(function);
  step.single = single, step.many = many, step.pointers = pointers, step.numbers = numbers, step.skew = skew;
  step.into = tensor(into);
  static_cast<Tape*>(tape)->push_back(std::move(step));
}

// Runs all steps from one on. Returns -1, or the number of the next one that failed.
extern "C" int64_t hessiankit_tape_run(const void* tape, int64_t first, int64_t threads) {
  const Tape& steps = *static_cast<const Tape*>(tape);
  Stack stack;
  for (size_t k = first; k < steps.size(); ++k) {
    try {
      if (!steps[k].run(threads, stack)) return int64_t(k);
    } catch (...) {
      return int64_t(k);
    }
  }
  return -1;
}
