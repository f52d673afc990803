#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/api.hpp"
#include "fsdp/communicator.hpp"
#include "fsdp/error.hpp"
#include "fsdp/incompatible_keys.hpp"
#include "fsdp/local_ranges.hpp"

// Checkpoints of any tensors, for programs with their own parameters or optimizers. save_checkpoint and load_checkpoint
// (checkpoint.hpp) are made of these functions.
//
// A checkpoint is a folder: ordinary .safetensors files with whole tensors, for each section the index that
// Hugging Face's tools expect, JSON documents, and fsdp_manifest.json with the sizes of all files and the CRC-32C of
// each block of 1 MiB. Every rank writes its own elements straight into the files and reads only its own;
// nothing is gathered.
namespace fsdp {

/// A checkpoint that cannot be written or read: a full disk, a damaged file, a folder that the ranks do not share.
/// Names the file, the tensor and the bytes. All ranks of a call throw it together, with one message.
class FSDP_API CheckpointError : public Error {
 public:
  using Error::Error;
};

/// This rank's part of one tensor.
struct FSDP_API CheckpointTensor {
  std::string name;
  /// The elements on this rank, in row-major order; possibly none. On any device.
  at::Tensor local;
  /// The whole tensor's sizes.
  std::vector<int64_t> sizes;
  /// If `is_sharded`: which elements of the whole tensor `local` has, in its row-major order.
  std::vector<ElementRange> ranges = {};
  /// False: `local` is the whole tensor, and the first rank's is saved.
  bool is_sharded = false;
  /// Further names under which the tensor can be loaded; they are saved with it.
  std::vector<std::string> other_names = {};
  /// The dtype in the file. Default: that of `local`.
  std::optional<at::ScalarType> dtype = {};
};

/// Tensors with their own files: NAME.safetensors, or NAME-00001-of-00003.safetensors and so on.
struct FSDP_API CheckpointSection {
  std::string name;  ///< "model", "optimizer"
  std::vector<CheckpointTensor> tensors;
};

struct FSDP_API CheckpointParts {
  std::vector<CheckpointSection> sections;
  /// JSON files, by file name. Rank 0's are saved; optimizer.json, which names parameters, is merged from all ranks.
  std::map<std::string, std::string> documents = {};
};

struct FSDP_API SaveCheckpointOptions {
  /// All ranks that hold a part. Default: the process's default world, or this rank alone if there is none.
  std::shared_ptr<Communicator> world = nullptr;
  /// The most bytes of a file, unless a single tensor is larger; a section then has several files.
  int64_t max_file_bytes = int64_t{4} << 30;
  /// The dtype in which the model's floating-point tensors are saved. Default: their own.
  std::optional<at::ScalarType> dtype = {};
  /// How many checkpoints of a series to keep: the one just saved, and those with the largest numbers. A series is folders
  /// beside `path` whose names differ only in the number at the end, such as step-100. 0: all.
  int keep_last = 0;
};

enum class VerifyChecksums {
  kWhileLoading,  ///< each block before its bytes are used; blocks before a damaged one are loaded by then
  kBeforeLoading,  ///< all blocks first, so everything is read twice; if one is damaged, nothing is changed
  kNever,
};

enum class CheckpointReaders {
  kAllRanks,   ///< every rank reads its own elements
  kFirstRank,  ///< only the first rank has access to the files; it reads them and sends them to the others
};

struct FSDP_API LoadCheckpointOptions {
  /// All ranks that load. Default: the process's default world, or this rank alone if there is none.
  std::shared_ptr<Communicator> world = nullptr;
  /// True: throws if names, sizes or dtypes do not fit. False: loads what fits and returns the rest.
  bool strict = true;
  /// True: tensors of another dtype are converted. False: they do not fit.
  bool convert_dtypes = false;
  VerifyChecksums verify = VerifyChecksums::kWhileLoading;
  CheckpointReaders readers = CheckpointReaders::kAllRanks;
  /// The most bytes of buffers on a rank, at least 4 MiB. A tensor that is not row-major in memory, such as a channels-last
  /// one, also needs a copy of itself.
  int64_t max_extra_bytes = int64_t{256} << 20;
  /// Returns the model's name for a name in the checkpoint; "" skips the tensor. Default: the same name. In the section
  /// "optimizer" it is called with the part before the last dot; in other sections than these two it is not called. See
  /// map_prefixes.
  std::function<std::string(const std::string& name)> rename = {};
  /// True: files may be symbolic links, as in Hugging Face's cache. False by default, so that an untrusted checkpoint cannot
  /// refer to other files of this machine.
  bool follow_symlinks = false;
};

/// For LoadCheckpointOptions::rename: replaces the longest key with which a name begins by its value. Other names stay.
FSDP_API std::function<std::string(const std::string&)> map_prefixes(std::map<std::string, std::string> prefixes);

/// Writes `parts` to the folder `path`. A collective call: all ranks pass the same names, sizes, dtypes and options. A rank may
/// leave out tensors of which it holds nothing.
///
/// An earlier checkpoint at `path` stays complete until the new one is on the disk, and is then replaced in one step. Files in
/// the folder that do not belong to the checkpoint are kept. After a crash at any time, `path` is the old checkpoint or the
/// new one. Files that an earlier, killed save left beside `path` are removed.
///
/// Throws, with an earlier checkpoint unchanged: UsageError for names that are repeated or cannot be saved, and for parts that
/// do not cover a tensor exactly once; CheckpointError if the ranks do not share the folder, if it holds something else, if
/// another job is writing it, or if it cannot be written.
FSDP_API void save_checkpoint_parts(const std::string& path, const CheckpointParts& parts,
                                    const SaveCheckpointOptions& options = {});

/// A checkpoint that is open for reading.
class FSDP_API CheckpointReader {
 public:
  /// path: a checkpoint's folder, any folder of .safetensors files with an index, or one such file. A collective call: the
  /// first rank reads manifest, index and headers for all. Throws CheckpointError if something is missing, damaged or not in
  /// the format.
  explicit CheckpointReader(const std::string& path, const LoadCheckpointOptions& options = {});
  ~CheckpointReader();
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  /// The number of ranks that saved it; 0: unknown, as for files of other programs.
  int world_size() const;
  bool has_section(const std::string& name) const;
  std::vector<std::string> sections() const;
  /// The text of a document; nullopt if there is none.
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
  /// The other names of a section's tied tensors, with the name under which each is saved.
  std::map<std::string, std::string> other_names(const std::string& section) const;

  /// Compares `section` with the checkpoint. No communication.
  IncompatibleKeys compare(const CheckpointSection& section) const;
  /// Loads the `local` tensors that fit. A collective call; ranks may ask for different tensors. If a tensor's `dtype` is set,
  /// the file has to have that dtype. With `strict`, throws UsageError that lists all misfits and those in `besides`, with
  /// nothing changed.
  IncompatibleKeys load(const std::vector<CheckpointSection>& sections, const IncompatibleKeys& besides = {});
  /// Reads all files and lists each block or file that differs from the manifest, with its tensors. Empty for files without a
  /// manifest. No communication.
  std::vector<std::string> find_damage() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The complete checkpoint in the folder `parent` whose name ends in the largest number; nullopt if there is none. No
/// communication.
FSDP_API std::optional<std::string> latest_checkpoint(const std::string& parent);

}  // namespace fsdp
