#include "checkpoint/io/find_damage.hpp"

#include <algorithm>
#include <optional>
#include <span>

#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/format/block_sums.hpp"
#include "checkpoint/format/manifest.hpp"
#include "checkpoint/io/checked_file.hpp"
#include "checkpoint/io/checkpoint_names.hpp"
#include "checkpoint/plan/load_plan.hpp"

namespace fsdp {

namespace {

/// One file's.
class DamageSearch {
 public:
  DamageSearch(const Catalogue& catalogue, const File& folder, std::string name)
      : catalogue_(catalogue), folder_(folder), name_(std::move(name)) {
    while (index_ < catalogue.files.size() && catalogue.files[index_].name != name_) ++index_;
  }

  void run(const Manifest::FileEntry& entry, bool follow_symlinks, std::vector<std::string>& damage) const {
    std::optional<CheckedFile> file;
    note(damage, [&] {
      file.emplace(File::open_in(folder_, name_, follow_symlinks), Catalogue::DataFile{name_, entry.bytes, entry.sums},
                   /*verifies=*/true, [this](int64_t begin, int64_t end) { return contents(begin, end); });
    });
    if (!file) return;
    std::vector<std::byte> block(kBlockBytes);
    for (int64_t begin = 0; begin < entry.bytes; begin += kBlockBytes)
      note(damage, [&] { file->read(begin, std::span(block).first(std::min(kBlockBytes, entry.bytes - begin))); });
  }

 private:
  template <class Read>
  static void note(std::vector<std::string>& damage, const Read& read) {
    try {
      read();
    } catch (const CheckpointError& error) {
      damage.emplace_back(error.what());
    }
  }

  /// Nothing for a file without tensors.
  std::string contents(int64_t begin, int64_t end) const {
    return index_ < catalogue_.files.size() ? tensors_in(catalogue_, index_, begin, end) : "";
  }

  const Catalogue& catalogue_;
  const File& folder_;
  std::string name_;
  size_t index_ = 0;
};

}  // namespace

std::vector<std::string> find_damage(const Catalogue& catalogue, bool follow_symlinks) {
  std::vector<std::string> damage;
  if (!is_checkpoint(catalogue.folder)) return damage;
  const auto folder = File::folder(catalogue.folder);
  const auto text = read_text(File::open_in(folder, kManifestFile, follow_symlinks), kMaxTextBytes);
  const auto manifest = parse_manifest(text, catalogue.folder + "/" + kManifestFile);
  for (const auto& [name, entry] : manifest.files) DamageSearch(catalogue, folder, name).run(entry, follow_symlinks, damage);
  return damage;
}

}  // namespace fsdp
