#include "checkpoint/io/load_values.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <unordered_map>

#include "checkpoint/checkpoint_error.hpp"
#include "checkpoint/format/block_sums.hpp"
#include "checkpoint/io/checked_file.hpp"
#include "checkpoint/io/tensor_bytes.hpp"

namespace fsdp {

namespace {

int64_t element_bytes(const Match& match) { return static_cast<int64_t>(c10::elementSize(match.entry->dtype)); }

/// The files of a checkpoint, one open at a time.
class OpenFiles {
 public:
  OpenFiles(const Catalogue& catalogue, const LoadCheckpointOptions& options)
      : catalogue_(catalogue),
        folder_(File::folder(catalogue.folder)),
        verifies_(options.verify != VerifyChecksums::kNever),
        follow_symlinks_(options.follow_symlinks) {}

  CheckedFile& at(size_t index) {
    if (!file_ || index != index_) {
      const auto& entry = catalogue_.files[index];
      file_.emplace(File::open_in(folder_, entry.name, follow_symlinks_), entry, verifies_,
                    [this, index](int64_t begin, int64_t end) { return tensors_in(catalogue_, index, begin, end); });
      index_ = index;
    }
    return *file_;
  }

 private:
  const Catalogue& catalogue_;
  File folder_;
  bool verifies_, follow_symlinks_;
  std::optional<CheckedFile> file_;
  size_t index_ = 0;
};

/// A quarter of what is allowed: there may be a copy for another dtype and one for a device besides.
int64_t window_bytes(const LoadCheckpointOptions& options, int64_t most) {
  return std::min(most, options.max_extra_bytes / 4);
}

void read_own(const Catalogue& catalogue, const std::vector<Match>& matches, const LoadCheckpointOptions& options) {
  if (matches.empty()) return;
  OpenFiles files(catalogue, options);
  for (const auto& match : matches) {
    TensorSink sink(match.tensor->local, match.entry->dtype, window_bytes(options, 4 * kBlockBytes));
    for (const auto& piece : pieces_of(match))
      for (int64_t done = 0; done < piece.count;) {
        const int64_t count = std::min(piece.count - done, sink.max_count());
        files.at(piece.file).read(piece.offset + done * element_bytes(match), sink.place(piece.local_begin + done, count));
        done += count;
      }
    sink.finish();  // a write on every rank, also where none of the elements are
  }
}

/// Reads what will be read, and keeps none of it.
void check_own(const Catalogue& catalogue, const std::vector<Match>& matches, const LoadCheckpointOptions& options) {
  OpenFiles files(catalogue, options);
  std::vector<std::byte> buffer(kBlockBytes);
  for (const auto& match : matches)
    for (const auto& piece : pieces_of(match)) {
      auto& file = files.at(piece.file);
      const int64_t end = piece.offset + piece.count * element_bytes(match);
      // Block by block, each checked where it lies whole in the buffer.
      for (int64_t begin = piece.offset; begin < end;) {
        const int64_t next = std::min(end, (begin / kBlockBytes + 1) * kBlockBytes);
        file.read(begin, std::span(buffer).first(next - begin));
        begin = next;
      }
    }
}

/// One tensor of the checkpoint that travels from the first rank in windows, to each rank's tensors that take it.
class Delivery {
 public:
  Delivery(std::span<const Match> matches, int64_t window) {
    for (const auto& match : matches)
      receivers_.push_back({pieces_of(match), element_bytes(match),
                            TensorSink(match.tensor->local, match.entry->dtype, window)});
  }

  void take(int64_t offset, std::span<const std::byte> window) {
    const int64_t end = offset + static_cast<int64_t>(window.size());
    for (auto& receiver : receivers_) take(receiver, offset, end, window);
  }

  void finish() {
    for (auto& receiver : receivers_) receiver.sink.finish();
  }

 private:
  struct Receiver {
    std::vector<FilePiece> pieces;
    int64_t element_bytes;
    TensorSink sink;
    size_t piece = 0;   // the first that is not all there
    int64_t taken = 0;  // elements of it
  };

  static void take(Receiver& receiver, int64_t offset, int64_t end, std::span<const std::byte> window) {
    const int64_t bytes = receiver.element_bytes;
    while (receiver.piece < receiver.pieces.size()) {
      const auto& piece = receiver.pieces[receiver.piece];
      const int64_t begin = piece.offset + receiver.taken * bytes;
      const int64_t count = std::min({piece.count - receiver.taken, (end - begin) / bytes, receiver.sink.max_count()});
      if (begin >= end || count <= 0) return;
      std::memcpy(receiver.sink.place(piece.local_begin + receiver.taken, count).data(), window.data() + (begin - offset),
                  count * bytes);
      receiver.taken += count;
      if (receiver.taken < piece.count) continue;
      receiver.taken = 0;
      ++receiver.piece;
    }
  }

  std::vector<Receiver> receivers_;
};

/// The first rank reads and sends everything that some rank needs.
class FromFirst {
 public:
  FromFirst(const RankGroup& ranks, const Catalogue& catalogue, const LoadCheckpointOptions& options)
      : ranks_(ranks), catalogue_(catalogue), options_(options), window_(window_bytes(options, 32 * kBlockBytes) / 16 * 16) {
    buffer_ = at::zeros({window_ + 1}, at::kByte);
    ranks.on_first([&] { files_.emplace(catalogue, options); });
  }

  void run(const std::vector<Match>& matches) {
    std::unordered_map<const Catalogue::TensorEntry*, std::vector<Match>> own;
    CatalogueEntries needed;
    for (const auto& match : matches) {
      own[match.entry].push_back(match);
      needed.insert(match.entry);
    }
    needed = from_bits(catalogue_, joined(ranks_.all_gather(to_bits(catalogue_, needed))));
    for (const auto& [name, section] : catalogue_.sections)
      for (const auto& entry : section.tensors)
        if (needed.contains(&entry)) deliver(entry, own[&entry]);
    ranks_.together([&] {
      if (failure_) std::rethrow_exception(failure_);
    });
  }

 private:
  void deliver(const Catalogue::TensorEntry& entry, const std::vector<Match>& matches) {
    std::optional<Delivery> delivery;
    attempt([&] { delivery.emplace(matches, window_bytes(options_, 4 * kBlockBytes)); });
    for (int64_t done = 0; done < entry.place.bytes;) {
      const int64_t bytes = std::min(window_, entry.place.bytes - done);
      const auto window = send(entry, entry.place.offset + done, bytes);
      attempt([&] { delivery->take(entry.place.offset + done, window); });
      done += bytes;
    }
    attempt([&] { delivery->finish(); });
  }

  /// What this rank does with what arrives. Where it fails the rank goes on receiving: the others count on it.
  template <class Take>
  void attempt(const Take& take) {
    if (failure_) return;
    try {
      take();
    } catch (...) {
      failure_ = std::current_exception();
    }
  }

  std::span<const std::byte> send(const Catalogue::TensorEntry& entry, int64_t offset, int64_t bytes) {
    auto* first = static_cast<std::byte*>(buffer_.mutable_data_ptr());
    std::string error;
    if (ranks_.is_first()) {
      try {
        files_->at(entry.place.file).read(offset, std::span(first, bytes));
      } catch (const std::exception& found) {  // whatever it is, the others wait
        error = found.what();
      }
      first[bytes] = error.empty() ? std::byte{0} : std::byte{1};
    }
    ranks_.broadcast(buffer_.narrow(0, 0, bytes + 1));
    if (first[bytes] != std::byte{0}) throw CheckpointError(ranks_.broadcast(error));
    return {first, static_cast<size_t>(bytes)};
  }

  const RankGroup& ranks_;
  const Catalogue& catalogue_;
  const LoadCheckpointOptions& options_;
  int64_t window_;
  at::Tensor buffer_;  // a window, and whether it could be read
  std::optional<OpenFiles> files_;
  std::exception_ptr failure_;
};

/// All of the files, on the first rank, which alone sees them.
void check_all(const Catalogue& catalogue, const LoadCheckpointOptions& options) {
  OpenFiles files(catalogue, options);
  std::vector<std::byte> buffer(kBlockBytes);
  for (size_t file = 0; file < catalogue.files.size(); ++file)
    for (int64_t begin = 0, end = 0; begin < catalogue.files[file].bytes; begin = end) {
      end = std::min(begin + kBlockBytes, catalogue.files[file].bytes);
      files.at(file).read(begin, std::span(buffer).first(end - begin));
    }
}

}  // namespace

void load_values(const RankGroup& ranks, const Catalogue& catalogue, const std::vector<Match>& matches,
                 const LoadCheckpointOptions& options) {
  const bool checks_first = options.verify == VerifyChecksums::kBeforeLoading;
  if (options.readers == CheckpointReaders::kFirstRank && ranks.size() > 1) {
    if (checks_first) ranks.on_first([&] { check_all(catalogue, options); });
    return FromFirst(ranks, catalogue, options).run(matches);
  }
  if (checks_first) ranks.together([&] { check_own(catalogue, matches, options); });
  ranks.together([&] { read_own(catalogue, matches, options); });
}

}  // namespace fsdp
