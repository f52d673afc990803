#pragma once

#include <memory>
#include <string>
#include <vector>

#include "py_ref.hpp"
#include "shown/shown_params.hpp"

namespace fsdp::python {

/// A sharded parameter, and the DTensor that is to stand for it from now on.
struct Replacement {
  std::shared_ptr<ShownParam> param;
  PyRef dtensor;

  at::Tensor local() const { return local_tensor_of(dtensor.get()); }
};

/// What a parameter that has several places (a tie) becomes where they hold different memory: it cannot be untied.
enum class Untied { kRefuse, kLeave };

/// What users, or load_state_dict(assign=True), have put in the places of sharded parameters. Where that is another sharded
/// parameter in another form, it is that one's DTensor. A place without a parameter asks for nothing.
///
/// Throws TypeError for a parameter that is no DTensor, ValueError for a DTensor that is cut otherwise than the parameter or
/// of other sizes, StateError for what is untied. Nothing changes.
std::vector<Replacement> find_replacements(const ShownParams& params, Untied untied);

/// In the whole model, as the core calls it.
std::string full_name_of(const ShownParam& param);

}  // namespace fsdp::python
