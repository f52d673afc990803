#pragma once

#include <optional>
#include <vector>

#include "group/group_parts.hpp"

namespace fsdp {

/// The dtypes of a group's parameters, by parameter: as they are, or as a change would have them.
struct ParamDtypes {
  std::vector<at::ScalarType> stored, gathered;
  std::vector<GroupLayout::Itemsizes> itemsizes;
  bool is_cast = false;  ///< one is gathered in another dtype than it is kept in
};

/// As they are.
ParamDtypes dtypes_of(const GroupParts& parts);
/// floating: that floating-point parameters are to be kept in; none: as they are. in_own_dtype: they are gathered in it.
ParamDtypes dtypes_in(const GroupParts& parts, std::optional<at::ScalarType> floating, bool in_own_dtype);

}  // namespace fsdp
