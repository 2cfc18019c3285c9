// Collectives as custom calls of XLA, by its foreign function interface.
//
// Operands and results are buffers in host memory; a token among either is passed over. Attributes: "group", a number
// from register_group(); "site", the text of a CallSite; "op", the name of a reduction (sum, mean, max, min, product);
// "root", a rank. Errors have the code INTERNAL and the text of Group::text_of().
//
//   all_reduce      results as operands, which they may alias; "op"
//   all_gather      a result is as many times its operand as there are ranks
//   broadcast       results as operands, which they may alias; "root"
//   reduce_scatter  an operand is as many times its result as there are ranks; "op"
//   reduce          results as operands, which they may alias; zeros but on rank "root"; "op"
//   barrier         neither
#pragma once

#include <array>

namespace accelerate_cpp::xla_calls {

// An XLA_FFI_Handler by its name; the pointers are valid for the life of the process.
struct NamedHandler {
  const char* name;
  void* handler;
};

std::array<NamedHandler, 6> handlers();

}  // namespace accelerate_cpp::xla_calls
