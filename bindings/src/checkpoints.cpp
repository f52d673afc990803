#include "checkpoints.hpp"

#include <pybind11/functional.h>

#include "base/require.hpp"
#include "checkpoint/plan/rank_group.hpp"
#include "checkpoint/sections/rng_section.hpp"
#include "fsdp/checkpoint_saver.hpp"
#include "fsdp/process_group.hpp"
#include "tensor/local_piece.hpp"

namespace fsdp::python {

namespace {

using World = std::shared_ptr<Communicator>;
using Ranges = std::vector<std::pair<int64_t, int64_t>>;

/// None: this rank alone.
World world_or_alone(World world) { return world ? std::move(world) : single_rank(); }

/// What a Python function raised, for all ranks: wrong arguments stay what they are.
[[noreturn]] void throw_as_ours(const py::error_already_set& error) {
  const auto text = py::str(error.value()).cast<std::string>();
  if (error.matches(PyExc_ValueError) || error.matches(PyExc_TypeError)) throw UsageError(text);
  throw Error(py::str(error.type().attr("__name__")).cast<std::string>() + ": " + text);
}

/// Calls a Python function, and `use` with what it returns, from the core, which is without the interpreter's lock.
template <class Use, class... Args>
void call_python(const py::object& function, const Use& use, const Args&... args) {
  py::gil_scoped_acquire gil;
  try {
    use(function(args...));
  } catch (const py::error_already_set& error) {
    throw_as_ours(error);
  }
}

CheckpointTensor tensor_from(const py::dict& given) {
  CheckpointTensor tensor{.name = given["name"].cast<std::string>(),
                          .local = tensor_of(given["local"]),
                          .sizes = given["sizes"].cast<std::vector<int64_t>>(),
                          .other_names = given["other_names"].cast<std::vector<std::string>>()};
  if (!given["dtype"].is_none()) tensor.dtype = given["dtype"].cast<at::ScalarType>();
  tensor.is_sharded = !given["ranges"].is_none();
  if (tensor.is_sharded)
    for (const auto& [begin, end] : given["ranges"].cast<Ranges>()) tensor.ranges.push_back({begin, end});
  return tensor;
}

std::vector<CheckpointSection> sections_from(const py::handle& given) {
  std::vector<CheckpointSection> sections;
  for (const auto& [name, tensors] : given.cast<py::dict>()) {
    auto& section = sections.emplace_back(CheckpointSection{name.cast<std::string>(), {}});
    for (const auto& tensor : tensors.cast<py::list>()) section.tensors.push_back(tensor_from(tensor.cast<py::dict>()));
  }
  return sections;
}

SaveCheckpointOptions save_options(const py::dict& given) {
  return {.max_file_bytes = given["max_file_bytes"].cast<int64_t>(), .keep_last = given["keep_last"].cast<int>()};
}

/// The Python function () -> (sections, documents), and the generators' state if it is asked for.
CheckpointParts parts_of(const py::object& collect, bool rng_state, const RankGroup& ranks) {
  CheckpointParts parts;
  call_python(collect, [&](const py::object& collected) {
    const auto [sections, documents] = collected.cast<std::pair<py::object, std::map<std::string, std::string>>>();
    parts = {.sections = sections_from(sections), .documents = documents};
  });
  if (rng_state) parts.sections.push_back(rng_section(ranks.rank(), ranks.size()));
  return parts;
}

void save_collected(const World& given_world, const std::string& path, const py::object& collect, const py::dict& given) {
  auto options = save_options(given);
  const bool rng_state = given["rng_state"].cast<bool>();
  options.world = world_or_alone(given_world);
  py::gil_scoped_release no_gil;
  const RankGroup ranks(options.world, "save_checkpoint");
  CheckpointParts parts;
  ranks.together([&] { parts = parts_of(collect, rng_state, ranks); });
  save_checkpoint_parts(path, parts, options);
}

template <class Value>
Value one_of(const std::map<std::string, Value>& known, const py::handle& given) {
  const auto found = known.find(given.cast<std::string>());
  require(found != known.end(), "load_checkpoint: '{}' is not one of the values of verify or readers",
          given.cast<std::string>());
  return found->second;
}

LoadCheckpointOptions load_options(const World& world, const py::dict& given) {
  static const std::map<std::string, VerifyChecksums> kVerify{{"while_loading", VerifyChecksums::kWhileLoading},
                                                              {"before_loading", VerifyChecksums::kBeforeLoading},
                                                              {"never", VerifyChecksums::kNever}};
  static const std::map<std::string, CheckpointReaders> kReaders{{"all_ranks", CheckpointReaders::kAllRanks},
                                                                 {"first_rank", CheckpointReaders::kFirstRank}};
  LoadCheckpointOptions options{.world = world_or_alone(world),
                                .strict = given["strict"].cast<bool>(),
                                .convert_dtypes = given["convert_dtypes"].cast<bool>(),
                                .verify = one_of(kVerify, given["verify"]),
                                .readers = one_of(kReaders, given["readers"]),
                                .max_extra_bytes = given["max_extra_bytes"].cast<int64_t>(),
                                .follow_symlinks = given["follow_symlinks"].cast<bool>()};
  if (const py::object rename = given["rename"]; !rename.is_none()) {
    auto function = std::make_shared<PyRef>(rename);
    options.rename = [function](const std::string& name) {
      std::string renamed;
      py::gil_scoped_acquire gil;
      call_python(
          function->object(),
          [&](const py::object& found) {
            if (!py::isinstance<py::str>(found))
              throw UsageError("load_checkpoint: rename: expected a str for '" + name + "', found " +
                               py::repr(found).cast<std::string>());
            renamed = found.cast<std::string>();
          },
          name);
      return renamed;
    };
  }
  return options;
}

/// An open checkpoint, with what belongs to a load beside the tensors.
class Reader {
 public:
  Reader(const std::string& path, const LoadCheckpointOptions& options)
      : reader_(path, options), ranks_(options.world, "load_checkpoint") {}

  const CheckpointReader& core() const { return reader_; }

  /// collect: () -> (sections, misfits that are found already). Returns all misfits, and whether the generators have
  /// their state back.
  std::pair<IncompatibleKeys, bool> load(const py::object& collect, bool rng_state) {
    py::gil_scoped_release no_gil;
    std::vector<CheckpointSection> sections;
    IncompatibleKeys besides;
    std::optional<CheckpointSection> rng;
    ranks_.together([&] {
      call_python(collect, [&](const py::object& collected) {
        auto [given, found] = collected.cast<std::pair<py::object, std::map<std::string, std::vector<std::string>>>>();
        sections = sections_from(given);
        besides = {.missing = found["missing"], .unexpected = found["unexpected"], .wrong = found["wrong"]};
      });
      if (rng_state) rng = rng_section(ranks_.rank(), ranks_.size());
      if (rng && !can_restore_rng(reader_, *rng, ranks_.size())) rng.reset();
      if (rng) sections.push_back(*rng);
    });
    auto misfits = reader_.load(sections, besides);
    if (rng) restore_rng(*rng, ranks_.rank());
    return {std::move(misfits), rng.has_value()};
  }

 private:
  CheckpointReader reader_;
  RankGroup ranks_;
};

std::shared_ptr<Reader> open_reader(const World& world, const std::string& path, const py::dict& given) {
  const auto options = load_options(world, given);
  py::gil_scoped_release no_gil;
  return std::make_shared<Reader>(path, options);
}

py::list tensors_of(const Reader& reader, const std::string& section) {
  py::list infos;
  for (const auto& info : reader.core().tensors(section)) {
    py::dict one;
    one["name"] = info.name;
    one["sizes"] = info.sizes;
    one["dtype"] = py::cast(info.dtype);
    one["file"] = info.file;
    one["offset"] = info.offset;
    infos.append(std::move(one));
  }
  return infos;
}

constexpr auto kStartSave = "CheckpointSaver.start_save";

/// A saver, with what the parts of a save depend on.
class Saver {
 public:
  explicit Saver(const CheckpointSaverOptions& options) : ranks_(options.world, kStartSave), saver_(options) {}

  bool start_save(const std::string& path, const py::object& collect, const py::dict& given) {
    const auto options = save_options(given);
    const bool rng_state = given["rng_state"].cast<bool>();
    py::gil_scoped_release no_gil;
    return saver_.start_save_parts(path, [&] { return parts_of(collect, rng_state, ranks_); }, options);
  }
  void wait() { saver_.wait(); }
  bool is_saving() const { return saver_.is_saving(); }

 private:
  RankGroup ranks_;
  CheckpointSaver saver_;
};

std::shared_ptr<Saver> make_saver(const World& world, bool refuses, std::optional<int64_t> max_copy_bytes) {
  CheckpointSaverOptions options{.world = world_or_alone(world),
                                 .when_saving = refuses ? WhenSaving::kRefuse : WhenSaving::kWait};
  if (max_copy_bytes) options.max_copy_bytes = *max_copy_bytes;
  py::gil_scoped_release no_gil;
  // The destructor waits for a thread that may let go of Python's tensors.
  return {new Saver(options), [](Saver* saver) {
            py::gil_scoped_release released;
            delete saver;
          }};
}

/// placements: for each dimension of the mesh (dimension of the tensor, split factor), None: replicated.
Ranges held_ranges(const std::vector<int64_t>& sizes, const std::vector<int64_t>& mesh_shape,
                   const std::vector<int64_t>& coordinates,
                   const std::vector<std::optional<std::pair<int64_t, int64_t>>>& given) {
  require(mesh_shape.size() == given.size() && coordinates.size() == given.size(),
          "held_ranges: expected a size, a coordinate and a placement for each dimension of the mesh, found {}, {} and {}",
          mesh_shape.size(), coordinates.size(), given.size());
  for (const int64_t size : sizes) require(size >= 0, "held_ranges: a size is {}", size);
  std::vector<Placement> placements;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto& cut = given[i];
    require(0 <= coordinates[i] && coordinates[i] < mesh_shape[i], "held_ranges: a coordinate is {} of {}", coordinates[i],
            mesh_shape[i]);
    require(!cut || (0 <= cut->first && cut->first < static_cast<int64_t>(sizes.size()) && cut->second >= 1),
            "held_ranges: a placement is ({}, {}) for {} dimensions", cut ? cut->first : 0, cut ? cut->second : 0,
            sizes.size());
    if (!cut)
      placements.emplace_back(Replicate{});
    else if (cut->second == 1)
      placements.emplace_back(Shard{cut->first});
    else
      placements.emplace_back(StridedShard{cut->first, cut->second});
  }
  Ranges ranges;
  for (const auto& range : element_ranges(sizes, mesh_shape, coordinates, placements))
    ranges.emplace_back(range.begin, range.end);
  return ranges;
}

}  // namespace

void define_checkpoints(py::module_& module) {
  module.def("save_checkpoint", &save_collected);
  module.def("open_checkpoint", &open_reader);
  module.def("checkpoint_saver", &make_saver);
  module.def("latest_checkpoint", &latest_checkpoint, py::call_guard<py::gil_scoped_release>());
  module.def("map_prefixes", &map_prefixes);
  module.def("held_ranges", &held_ranges);
  py::class_<Reader, std::shared_ptr<Reader>> reader(module, "CheckpointReader");
  not_made_by_python(reader)
      .def("world_size", [](const Reader& self) { return self.core().world_size(); })
      .def("documents", [](const Reader& self) { return self.core().documents(); })
      .def("document", [](const Reader& self, const std::string& name) { return self.core().document(name); })
      .def("sections", [](const Reader& self) { return self.core().sections(); })
      .def("tensors", &tensors_of)
      .def("other_names", [](const Reader& self, const std::string& section) { return self.core().other_names(section); })
      .def("find_damage", [](const Reader& self) { return self.core().find_damage(); },
           py::call_guard<py::gil_scoped_release>())
      .def("load", [](Reader& self, const py::object& collect, bool rng_state) {
        const auto [misfits, restored] = self.load(collect, rng_state);
        return py::make_tuple(misfits.missing, misfits.unexpected, misfits.wrong, restored);
      });
  py::class_<Saver, std::shared_ptr<Saver>> saver(module, "CheckpointSaver");
  not_made_by_python(saver)
      .def("start_save", &Saver::start_save)
      .def("wait", &Saver::wait, py::call_guard<py::gil_scoped_release>())
      .def("is_saving", &Saver::is_saving);
}

}  // namespace fsdp::python
