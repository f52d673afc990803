#pragma once

#include <string>
#include <vector>

#include "mesh/mesh_info.hpp"

namespace fsdp {

/// A group of parameters, for whoever tells what it does.
struct GroupIdentity {
  std::string name;                       ///< of its module, "blocks.3"
  MeshInfo mesh_info;                     ///< over whose ranks it communicates
  std::vector<std::string> params = {};   ///< their names
  int id = -1;                            ///< its number in its root; -1: it has been in none
};

}  // namespace fsdp
