#pragma once

#include <chrono>
#include <string>

#include "trace/desync/desync_board.hpp"
#include "trace/desync/verdict/desync_verdict.hpp"

namespace fsdp {

/// Asks all ranks what they did, and gives the verdict where they disagree: it is posted once, and every rank takes it over.
///
/// Thread-safe. Throws what the board throws.
class DesyncInquiry {
 public:
  /// settling: how long the ranks have to say what they did. `board` and `verdict` outlive this.
  DesyncInquiry(DesyncBoard& board, DesyncVerdict& verdict, std::chrono::milliseconds settling)
      : board_(board), verdict_(verdict), settling_(settling) {}

  /// Takes over the verdict that some rank has given. False: none has.
  bool take_over_verdict();
  void give_verdict(const Verdict& found);
  /// On rank 0, waits until the others know the verdict, have ended, or have had the time to settle. Rank 0's process
  /// usually serves the store that they read the verdict from, and may end with it. Other ranks wait for nothing.
  void await_others();

  /// A report of another rank differs from `own`: gives the verdict, which says what every rank did as far as it says
  /// so in time.
  void give_difference(const RankReport& own);
  /// A collective has failed here: posts `own`, and gives the verdict if neighbours differ from it.
  void explain_failure(const RankReport& own);
  /// Ranks have ended with fewer collectives than `own`: what this one waits for is in vain, which is the verdict.
  void give_gone(const RankReport& own);

 private:
  DesyncBoard& board_;
  DesyncVerdict& verdict_;
  const std::chrono::milliseconds settling_;
};

}  // namespace fsdp
