// Calls the float32 product of a library of CPU kernels, as XLA would, and prints its largest error relative to the
// terms of each sum. Finds every symbol that is named. Usage: call_product LIBRARY SYMBOL...
#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace {

XLA_FFI_Error* NumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = 1;
  return nullptr;
}

const char* message = nullptr;

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  message = args->message;
  std::fprintf(stderr, "%s\n", message);
  return reinterpret_cast<XLA_FFI_Error*>(&message);
}

struct Matrix {
  int64_t dims[2];
  std::vector<float> values;
  XLA_FFI_Buffer buffer;

  Matrix(int64_t rows, int64_t columns) : dims{rows, columns}, values(rows * columns) {
    buffer = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_F32, values.data(), 2, dims};
  }
  void Fill(uint32_t seed) {
    for (float& each : values) {
      seed = seed * 1664525 + 1013904223;
      each = static_cast<float>(seed >> 8) / (1 << 23) - 1;
    }
  }
};

}  // namespace

int main(int count, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  for (int i = 2; i < count; i++)
    if (dlsym(library, arguments[i]) == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  auto* product = reinterpret_cast<XLA_FFI_Handler*>(dlsym(library, "JaxserveProductFloat"));

  const int64_t rows = 37, in = 301, out = 101;  // divided by no width of a vector
  Matrix x(rows, in), kernel(out, in), y(rows, out), packed(64, in);
  x.Fill(1), kernel.Fill(2);
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_ThreadPool_NumThreads = NumThreads;
  XLA_FFI_ArgType arg_types[] = {XLA_FFI_ArgType_BUFFER, XLA_FFI_ArgType_BUFFER};
  XLA_FFI_RetType ret_types[] = {XLA_FFI_RetType_BUFFER, XLA_FFI_RetType_BUFFER};
  void *args[] = {&x.buffer, &kernel.buffer}, *rets[] = {&y.buffer, &packed.buffer};
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, 2, arg_types, args};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, 2, ret_types, rets};
  frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  if (product(&frame) != nullptr) return 1;

  double largest = 0;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = 0; o < out; o++) {
      double sum = 0, terms = 0;
      for (int64_t k = 0; k < in; k++) {
        const double term = static_cast<double>(x.values[r * in + k]) * kernel.values[o * in + k];
        sum += term, terms += std::fabs(term);
      }
      largest = std::fmax(largest, std::fabs(y.values[r * out + o] - sum) / terms);
    }
  std::printf("%.3g\n", largest);
  return 0;
}
