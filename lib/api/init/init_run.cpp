#include "api/init/init_run.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "api/params/find_param.hpp"
#include "api/params/own_rows.hpp"
#include "base/require.hpp"
#include "root/group_port.hpp"

namespace fsdp {

namespace {

/// Which sequence of random numbers a tensor has: FNV-1a of its name, the same on every machine.
uint64_t stream_of(const std::string& name) {
  uint64_t value = 14695981039346656037ull;
  for (const unsigned char letter : name) value = (value ^ letter) * 1099511628211ull;
  return value;
}

/// Of an entry that belongs to a group.
FoundParam param_of(const TreeEntry& entry) { return {entry.group, entry.index, /*is_unsharded_param=*/false}; }

at::ScalarType draw_dtype(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

template <class Scalar>
void draw_range(Scalar* out, ElementRange range, uint64_t seed, uint64_t stream,
                const DrawRange& function) {
  constexpr int64_t kGrain = 1 << 14, kBlock = 1 << 10;
  at::parallel_for(range.begin, range.end, kGrain, [&](int64_t begin, int64_t end) {
    double values[kBlock];
    for (int64_t first = begin; first < end; first += kBlock) {
      const auto last = std::min(end, first + kBlock);
      function({first, last}, seed, stream, values);
      for (int64_t i = 0; i < last - first; ++i)
        out[first - range.begin + i] = static_cast<Scalar>(values[i]);
    }
  });
}

}  // namespace

InitRun::InitRun(ModuleTree tree, const InitOptions& options, Targets targets, const char* caller)
    : tree_(std::move(tree)), options_(options), targets_(targets), caller_(caller) {
  const auto count = tree_.parameters.size() + tree_.buffers.size();
  for (size_t i = 0; i < count; ++i) {
    const auto& known = entry(i);
    known_[known.tensor.unsafeGetTensorImpl()] = i;
    if (known.group)
      if (const auto unsharded_param = known.group->params()[known.index].unsharded_param(); unsharded_param.defined())
        known_[unsharded_param.unsafeGetTensorImpl()] = i;
    is_target_.push_back(targets == Targets::kAll || known.tensor.is_meta());
  }
  is_covered_.resize(count);
}

const TreeEntry& InitRun::entry(size_t i) const {
  const auto params = tree_.parameters.size();
  return i < params ? tree_.parameters[i] : tree_.buffers[i - params];
}

void InitRun::apply_all() {
  Initializer init(*this);
  for (const auto position : tree_.innermost_first) {
    auto& module = *tree_.modules[position].module;
    const auto fits = [&](const ModuleInitializer& candidate) {
      return candidate.apply(module, init);
    };
    if (std::any_of(options_.initializers.begin(), options_.initializers.end(), fits)) continue;
    std::any_of(known_initializers().begin(), known_initializers().end(), fits);
  }
}

std::string InitRun::uncovered(size_t owner) const {
  std::vector<std::string> names;
  for (size_t i = 0; i < is_target_.size(); ++i) {
    const auto& missing = entry(i);
    const bool is_buffer = i >= tree_.parameters.size();
    // A buffer that has values may keep them.
    const bool is_needed = is_target_[i] && (!is_buffer || missing.tensor.is_meta());
    if (missing.owner != owner || !is_needed || is_covered_[i]) continue;
    const auto& path = tree_.modules[owner].path;
    names.push_back((is_buffer ? "buffer " : "") +
                    missing.name.substr(path.empty() ? 0 : path.size() + 1));
  }
  if (names.empty()) return {};
  const auto& [module, path] = tree_.modules[owner];
  return fmt::format("'{}' ({}): {}", path, module->name(), fmt::join(names, ", "));
}

void InitRun::rehearse() {
  rehearses_ = true;
  apply_all();
  rehearses_ = false;
  std::vector<std::string> modules;
  for (size_t owner = 0; owner < tree_.modules.size(); ++owner)
    if (auto line = uncovered(owner); !line.empty()) modules.push_back(std::move(line));
  require(modules.empty(),
          "{}: no initialiser covers {}. Nothing has changed; add "
          "fsdp::initializer<Class>(function) for these classes to InitOptions::initializers",
          caller_, fmt::join(modules, "; "));
}

void InitRun::run() { apply_all(); }

size_t InitRun::find(const at::Tensor& tensor) const {
  const auto found = known_.find(tensor.unsafeGetTensorImpl());
  require(found != known_.end(),
          "{}: an initialiser was given a tensor of sizes {} that is no parameter or buffer of the module; pass the module's "
          "own parameter or buffer, not a copy or a view",
          caller_, fmt::join(tensor.sizes(), "x"));
  return found->second;
}

const TreeEntry* InitRun::target(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  const auto i = find(tensor);
  is_covered_[i] = true;
  return is_target_[i] && !rehearses_ ? &entry(i) : nullptr;
}

c10::IntArrayRef InitRun::sizes(const at::Tensor& tensor) const {
  const auto& known = entry(find(tensor));
  return known.group ? whole_sizes(param_of(known)) : known.tensor.sizes();
}

std::vector<ElementRange> InitRun::ranges(const TreeEntry& entry) const {
  if (!entry.group) return {{0, entry.tensor.numel()}};
  return ranges_of(param_of(entry));
}

at::Tensor InitRun::draw(const TreeEntry& entry, const std::vector<ElementRange>& ranges,
                         const DrawRange& function, uint64_t salt) const {
  int64_t numel = 0;
  for (const auto& range : ranges) numel += range.count();
  auto values = at::empty({numel}, at::TensorOptions().dtype(draw_dtype(entry.tensor)));
  const auto stream = stream_of(entry.name) ^ salt;
  int64_t done = 0;
  for (const auto& range : ranges) {
    if (values.scalar_type() == at::kDouble)
      draw_range(values.mutable_data_ptr<double>() + done, range, options_.seed, stream, function);
    else
      draw_range(values.mutable_data_ptr<float>() + done, range, options_.seed, stream, function);
    done += range.count();
  }
  return values;
}

void InitRun::write_local(const TreeEntry& entry, const at::Tensor& values) const {
  at::NoGradGuard no_grad;
  if (!entry.group) {
    entry.tensor.detach().copy_(values.view(entry.tensor.sizes()));
    return;
  }
  std::lock_guard lock(root_of(*entry.group).mutex());
  const auto local = plain_view(entry.tensor);
  local.copy_(values.view(local.sizes()));
  entry.group->parts().owner().note_write(entry.index);
}

void InitRun::write_whole(const TreeEntry& entry, const at::Tensor& whole) const {
  if (!entry.group) return write_local(entry, whole.reshape({-1}));
  write_local(entry, own_of_whole(param_of(entry), whole).reshape({-1}));
}

uint64_t InitRun::generator_seed(const TreeEntry& entry) const {
  ElementRandom random(options_.seed, stream_of(entry.name), 0);
  const uint64_t high = random.bits();
  return high << 32 | random.bits();
}

}  // namespace fsdp
