#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/error.hpp"
#include "fsdp/local_ranges.hpp"

// Checkpoints of any tensors: what save_checkpoint and load_checkpoint of modules (checkpoint.hpp) are made of,
// for programs that keep their parameters or optimizers otherwise.
//
// A checkpoint is a folder: ordinary .safetensors files with whole tensors, for each section the index that
// Hugging Face's tools expect, JSON documents, and fsdp_manifest.json with the sizes of all files and the CRC-32C of
// each block of 1 MiB. Every rank writes its own elements straight into the files and reads only its own;
// nothing is gathered.
namespace fsdp {

/// A checkpoint that cannot be written or read: a full disk, a damaged file, a folder that the ranks do not share.
/// Names the file, the tensor and the bytes. All ranks of a call throw it together, with one message.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

/// What one rank holds of one tensor.
struct CheckpointTensor {
  std::string name;
  /// The elements that this rank holds, read row-major; it may have none. Any device.
  at::Tensor local;
  /// The whole tensor's.
  std::vector<int64_t> sizes;
  /// is_sharded: the elements of the whole that `local` holds, in its order, row-major.
  std::vector<ElementRange> ranges = {};
  /// False: `local` is the whole, and what the first rank has is saved.
  bool is_sharded = false;
  /// Saved with the tensor; it is found under these too.
  std::vector<std::string> other_names = {};
  /// In the file; none: `local`'s.
  std::optional<at::ScalarType> dtype = {};
};

/// Tensors that go into files of their own: NAME.safetensors, or NAME-00001-of-00003.safetensors and so on.
struct CheckpointSection {
  std::string name;  ///< "model", "optimizer"
  std::vector<CheckpointTensor> tensors;
};

struct CheckpointParts {
  std::vector<CheckpointSection> sections;
  /// Files of JSON, by file name. What rank 0 has is saved; of optimizer.json, which names parameters, what all have.
  std::map<std::string, std::string> documents = {};
};

struct SaveCheckpointOptions {
  /// All ranks that hold something; null: the process's default world, or this rank alone if there is none.
  std::shared_ptr<Communicator> world = nullptr;
  /// A section's tensors are split over files of at most this many bytes; a larger tensor has a file of its own.
  int64_t max_file_bytes = int64_t{4} << 30;
  /// The model's floating-point tensors are saved in this dtype; none: in their own.
  std::optional<at::ScalarType> dtype = {};
  /// Keeps this many checkpoints of a series, folders beside `path` whose names differ in the number at their end
  /// alone, such as step-100: the one just saved, and of the others those with the largest numbers. 0: keeps all.
  int keep_last = 0;
};

enum class VerifyChecksums {
  kWhileLoading,  ///< as bytes are read: no byte is used unchecked, but what came before a damaged block is loaded
  kBeforeLoading,  ///< everything is read twice, so that nothing is changed if a block is damaged
  kNever,
};

enum class CheckpointReaders {
  kAllRanks,   ///< every rank reads what it needs
  kFirstRank,  ///< only the first rank sees the files; it reads them and sends them on, in bounded pieces
};

struct LoadCheckpointOptions {
  /// As for saving.
  std::shared_ptr<Communicator> world = nullptr;
  /// Throw if names do not fit exactly; false: load what fits and return the rest.
  bool strict = true;
  /// Tensors of another dtype are converted; false: they are an error.
  bool convert_dtypes = false;
  VerifyChecksums verify = VerifyChecksums::kWhileLoading;
  CheckpointReaders readers = CheckpointReaders::kAllRanks;
  /// At most so many bytes of buffers on a rank, 4 MiB at least. A tensor on this rank that is not row-major in memory,
  /// such as a channels-last one, needs a copy of its own besides.
  int64_t max_extra_bytes = int64_t{256} << 20;
  /// The name that the model has for what the checkpoint calls `name`; "" leaves the tensor out. Unset: the same.
  /// Of the section "optimizer", the part before the last dot is renamed; other sections keep theirs. See map_prefixes.
  std::function<std::string(const std::string& name)> rename = {};
  /// Files that are symbolic links are read: Hugging Face's cache is made of them. Off, so that a checkpoint from
  /// elsewhere cannot name other files of this machine.
  bool follow_symlinks = false;
};

/// For LoadCheckpointOptions::rename: a name that begins with a key gets its value instead, the longest key
/// winning; others stay.
std::function<std::string(const std::string&)> map_prefixes(std::map<std::string, std::string> prefixes);

/// What of a section did not fit, each with its name in quotes.
struct CheckpointMisfits {
  std::vector<std::string> missing;     ///< asked for, not in the checkpoint
  std::vector<std::string> unexpected;  ///< in the checkpoint, not asked for; after `load`, by no rank
  std::vector<std::string> wrong;       ///< other sizes or dtypes, with both
  bool none() const { return missing.empty() && unexpected.empty() && wrong.empty(); }
};

/// Writes `parts` to the folder `path`: a collective call, and every rank passes the same names, sizes, dtypes and
/// options. A tensor that some ranks do not know is saved from those that do.
///
/// A checkpoint that is at `path` already stays whole until the new one is on the disk, and is then replaced in one
/// step; files in it that are not the checkpoint's own move over. A kill at any moment leaves the one or the other.
/// What an earlier, killed save left beside `path` is removed.
///
/// Throws UsageError for names that are repeated or cannot be saved, and parts that do not make up a tensor exactly
/// once; CheckpointError if the folder is not shared by the ranks, holds something else, is being written by
/// another job, or cannot be written. Nothing of an old checkpoint is lost then.
void save_checkpoint_parts(const std::string& path, const CheckpointParts& parts, const SaveCheckpointOptions& options = {});

/// A checkpoint that is open for reading.
class CheckpointReader {
 public:
  /// path: the folder of a checkpoint, any folder with .safetensors files and their index, or one such file. A
  /// collective call: the first rank reads manifest, index and headers and tells the others.
  /// Throws CheckpointError for what is missing, damaged or not what the format allows.
  explicit CheckpointReader(const std::string& path, const LoadCheckpointOptions& options = {});
  ~CheckpointReader();
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  /// How many ranks saved it; 0: not known, as for files from elsewhere.
  int world_size() const;
  bool has_section(const std::string& name) const;
  std::vector<std::string> sections() const;
  /// A document's text; nullopt: there is none.
  std::optional<std::string> document(const std::string& name) const;
  std::vector<std::string> documents() const;
  /// A section's tensors, under the names that `rename` gives them.
  struct TensorInfo {
    std::string name;
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    std::string file;    ///< in the folder
    int64_t offset = 0;  ///< of its first byte there
  };
  std::vector<TensorInfo> tensors(const std::string& section) const;
  /// A section's other names of tied tensors, each with the one that its tensor is saved under.
  std::map<std::string, std::string> other_names(const std::string& section) const;

  /// How `section` fits the checkpoint. No communication.
  CheckpointMisfits compare(const CheckpointSection& section) const;
  /// Writes what the checkpoint has into the `local` tensors that fit, on this rank. A collective call; ranks may ask
  /// for different tensors.
  /// `dtype`, where it is set, is the one that the file should have. Throws UsageError listing all misfits, if
  /// `strict`, before anything is changed. besides: what else the caller found not to fit, to be listed with the rest.
  CheckpointMisfits load(const std::vector<CheckpointSection>& sections, const CheckpointMisfits& besides = {});
  /// Reads all files of the manifest and tells each block and file that is not as it says, with its tensors. Of files from
  /// elsewhere, which have no manifest, nothing. No communication.
  std::vector<std::string> find_damage() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The complete checkpoint in the folder `parent` with the largest number at the end of its name; nullopt:
/// there is none. No communication.
std::optional<std::string> latest_checkpoint(const std::string& parent);

}  // namespace fsdp
