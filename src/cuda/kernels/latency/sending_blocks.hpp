// Which blocks of a latency dispatch send and which receive. Plain arithmetic.
#pragma once
#include "core/device.hpp"

namespace ferry::cuda {

/// Some of the blocks, and the place of this one among them.
struct BlockShare {
  int index = 0;
  int blocks = 1;
};

/// Which blocks do nothing but send. Once the links are full, each load of an SM that sends waits
/// until its stores are gone; so LL128 rows, which are waited for one by one, are sent by some
/// SMs and received by the others. With two blocks an SM those a row of blocks apart share one.
struct SendingBlocks {
  int all = 1;     ///< blocks of the call
  int row = 1;     ///< blocks until an SM has its second
  int of_row = 0;  ///< that only send, of each row the first; 0: all blocks do both

  /// That only send.
  FERRY_FN constexpr int sending() const {
    const int second = all - row;
    return of_row + (second < of_row ? second : of_row);
  }
  FERRY_FN constexpr int receiving() const { return all - sending(); }
  FERRY_FN constexpr bool sends_only(int block) const { return block % row < of_row; }
  /// Of a block that only sends.
  FERRY_FN constexpr BlockShare sender(int block) const {
    return {block / row * of_row + block % row, sending()};
  }
  /// Of one that does not.
  FERRY_FN constexpr BlockShare receiver(int block) const {
    return {block / row * (row - of_row) + block % row - of_row, receiving()};
  }
};

/// A quarter of the SMs keeps the links full.
inline constexpr int kPartThatSends = 4;

/// For LL128 rows: `blocks` on `num_sms` SMs, at most `most` on each. The last `heads` blocks make
/// headers, and are not among those that only send; where there is no room for that, none is.
FERRY_FN constexpr SendingBlocks sending_blocks(int blocks, int num_sms, int most, int heads) {
  SendingBlocks shared{blocks, blocks < num_sms ? blocks : num_sms, 0};
  const int of_row = shared.row / kPartThatSends;
  const int last_row = blocks > shared.row ? blocks - shared.row : shared.row;
  if (blocks <= most * num_sms && of_row + heads <= last_row) shared.of_row = of_row;
  return shared;
}

}  // namespace ferry::cuda
