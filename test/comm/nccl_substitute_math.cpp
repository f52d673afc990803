#include "nccl_substitute_math.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstring>
#include <stdexcept>
#include <string_view>

#include "comm/threads/local_reduce.hpp"

namespace fsdp::test {
namespace {

at::ScalarType scalar_type(ncclDataType_t dtype) {
  switch (dtype) {
    case ncclInt8:
      return at::kChar;
    case ncclUint8:
      return at::kByte;
    case ncclInt32:
      return at::kInt;
    case ncclInt64:
      return at::kLong;
    case ncclFloat16:
      return at::kHalf;
    case ncclFloat32:
      return at::kFloat;
    case ncclFloat64:
      return at::kDouble;
    case ncclBfloat16:
      return at::kBFloat16;
    default:
      throw std::logic_error(fmt::format("dtype {} of NCCL", static_cast<int>(dtype)));
  }
}

/// The memory itself.
at::Tensor tensor_at(const void* memory, size_t count, ncclDataType_t dtype) {
  return at::from_blob(const_cast<void*>(memory), {static_cast<int64_t>(count)}, scalar_type(dtype));
}

ReduceOp reduce_op(ncclRedOp_t op) {
  return op == ncclMax ? ReduceOp::kMax : op == ncclMin ? ReduceOp::kMin : ReduceOp::kSum;
}

using Ranks = std::map<int, std::vector<NcclCall>>;

/// Elements [begin, begin + count) of the `index`-th call's inputs, multiplied and reduced.
at::Tensor reduced(const Ranks& by_rank, size_t index, size_t begin, size_t count) {
  std::vector<at::Tensor> pieces;
  const NcclCall& any = by_rank.begin()->second[index];
  for (const auto& [rank, calls] : by_rank) {
    const NcclCall& call = calls[index];
    const auto piece = tensor_at(call.input, begin + count, call.dtype).narrow(0, static_cast<int64_t>(begin),
                                                                               static_cast<int64_t>(count));
    pieces.push_back(call.scale == 1 ? piece.clone() : piece * call.scale);
  }
  const auto result = at::empty_like(pieces[0]);
  reduce_in_order(result, pieces, reduce_op(any.op));
  return result;
}

void store(const NcclCall& call, const at::Tensor& result) {
  std::memcpy(call.output, result.const_data_ptr(), result.nbytes());
}

void gather(const Ranks& by_rank, size_t index) {
  for (const auto& [to, to_calls] : by_rank)
    for (const auto& [from, from_calls] : by_rank) {
      const size_t bytes = from_calls[index].count;
      std::memmove(static_cast<char*>(to_calls[index].output) + from * bytes, from_calls[index].input, bytes);
    }
}

void reduce(const Ranks& by_rank, size_t index, bool is_scattered) {
  std::vector<at::Tensor> results;
  for (const auto& [rank, calls] : by_rank)
    results.push_back(
        reduced(by_rank, index, is_scattered ? rank * calls[index].count : 0, calls[index].count));
  for (const auto& [rank, calls] : by_rank) store(calls[index], results[rank]);
}

}  // namespace

const void* buffer_of_all(const NcclCall& call) {
  return std::string_view(call.name) == "reduce_scatter" ? call.input : call.output;
}

std::string signature(const std::vector<NcclCall>& calls) {
  std::string text;
  for (const NcclCall& call : calls) {
    // Operators of a rank's own have numbers of its own.
    const int op = call.op >= ncclNumOps ? ncclNumOps : call.op;
    text += fmt::format("{}{} of {} x dtype {}, op {}, root {}", text.empty() ? "" : "; ", call.name, call.count,
                        static_cast<int>(call.dtype), op, call.root);
    if (call.window > 0) text += fmt::format(", window {} from {} on", call.window, call.window_offset);
  }
  return text;
}

void run_collectives(const Ranks& by_rank) {
  const auto& first = by_rank.begin()->second;
  for (size_t i = 0; i < first.size(); ++i) {
    const std::string name = first[i].name;
    if (name == "all_gather") {
      gather(by_rank, i);
    } else if (name == "broadcast") {
      const NcclCall& root = by_rank.at(first[i].root)[i];
      for (const auto& [rank, calls] : by_rank)
        if (rank != first[i].root) std::memcpy(calls[i].output, root.input, root.count);
    } else {
      reduce(by_rank, i, /*is_scattered=*/name == "reduce_scatter");
    }
  }
}

double scalar_in(double value, ncclDataType_t dtype) {
  return at::scalar_tensor(value, scalar_type(dtype)).to(at::kDouble).item<double>();
}

double scalar_value(const void* scalar, ncclDataType_t dtype) {
  return tensor_at(scalar, 1, dtype).to(at::kDouble).item<double>();
}

}  // namespace fsdp::test
