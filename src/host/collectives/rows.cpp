// copy_rows and add_rows: rows that ranks of one domain read from each other, as a table says.
// Where all ranks lend their tensors, they are read where they lie; else in windows, in which a
// rank shows each row that others need once.
#include <algorithm>
#include <optional>

#include "host/collectives/lent.hpp"
#include "host/kernels/kernels.hpp"

namespace ferry::host {
namespace {

class Rows {
 public:
  Rows(HostCollectives& all, const ConstTensorView& x, const TensorView& out, const RowTable& table)
      : all_(all),
        call_(table.adds ? "add_rows" : "copy_rows"),
        adds_(table.adds),
        data_(static_cast<const std::byte*>(x.data)),
        out_(static_cast<std::byte*>(out.data)),
        row_bytes_(index(x.columns()) * size_of(x.dtype)),
        bytes_(index(x.shape[0]) * row_bytes_),
        out_bytes_(index(out.shape[0]) * row_bytes_),
        head_(head_of(table.adds ? CallKind::add_rows : CallKind::copy_rows, x.dtype, x.columns())),
        shown_(index(all.size())) {
    head_.call.rows = {table.rows, table.slots, table.hash, 0};
    for (const RowTable::Move& move : table.moves) take_in(move);
    std::ranges::stable_sort(reads_, {}, &Read::to);  // sums keep the order of the table
    std::size_t most = 1;
    for (const auto& rows : shown_) most = std::max(most, rows.size());
    slot_ = std::min(row_bytes_, all.staging().window_bytes / most / kLineBytes * kLineBytes);
  }

  void run() {
    const Lent lent(all_, head_, data_, bytes_);
    if (!lends(head_)) write_window(0);
    all_.meet(call_, head_);
    const Lenders lenders(all_);
    if (lenders.every) return read_in_place();
    if (lends(head_)) write_window(0);
    if (lenders.some) all_.meet_members(call_);  // some ranks wrote their windows only now
    for (std::size_t first = 0; first < row_bytes_; first += slot_) {
      if (first > 0) {
        write_window(first);
        all_.meet_members(call_);
      }
      all_.begin_round();
      read(first, std::min(slot_, row_bytes_ - first),
           [&](const Read& from) { return all_.staged(from.rank, window_ + from.place * slot_); });
    }
  }

 private:
  /// A row of another rank, or of this one, that a row of `out` takes.
  struct Read {
    int rank;
    std::size_t row;
    std::size_t place;  // among those that the rank shows
    std::size_t to;
  };

  /// All ranks go through all moves, so that each knows the places in all windows.
  void take_in(const RowTable::Move& move) {
    std::vector<std::size_t>& rows = shown_[index(move.from)];
    auto found = std::ranges::find(rows, index(move.row));
    if (move.from == move.to) {
      found = rows.begin();  // read where it lies
    } else if (found == rows.end()) {
      found = rows.insert(rows.end(), index(move.row));
    }
    if (move.to != all_.rank()) return;
    reads_.push_back({move.from, index(move.row), index(found - rows.begin()), index(move.to_row)});
  }

  void read_in_place() {
    {
      const Borrowed borrowed(all_, call_, all_.members(), [this](int) { return bytes_; });
      read(0, row_bytes_, [&](const Read& from) {
        return borrowed.tensors()[index(from.rank)] + from.row * row_bytes_;
      });
    }
    all_.meet_members(call_);  // nobody reads any more: whoever lent may write again
  }

  void write_window(std::size_t first) {
    window_ = all_.next_window();
    std::byte* to = all_.staged(all_.rank(), window_);
    for (const std::size_t row : shown_[index(all_.rank())]) {
      all_.show(to, data_ + row * row_bytes_ + first, std::min(slot_, row_bytes_ - first));
      to += slot_;
    }
  }

  /// `bytes` of each row, from byte `first`; `shown(read)`: where those lie that another rank
  /// shows.
  template <class Shown>
  void read(std::size_t first, std::size_t bytes, const Shown& shown) {
    std::vector<const void*> rows;
    for (auto next = reads_.begin(); next != reads_.end();) {
      const std::size_t to = next->to;
      std::byte* const at = out_ + to * row_bytes_ + first;
      rows.assign(1, at);
      for (; next != reads_.end() && next->to == to; ++next) {
        rows.push_back(next->rank == all_.rank() ? data_ + next->row * row_bytes_ + first
                                                 : shown(*next));
      }
      if (!adds_) {
        copy_result(out_bytes_, at, rows.back(), bytes);
        continue;
      }
      kernels().sum_rows({.rows = rows.data(),
                          .count = static_cast<std::int64_t>(rows.size()),
                          .out = at,
                          .columns = static_cast<std::int64_t>(bytes / sizeof(float))});
    }
  }

  HostCollectives& all_;
  const char* call_;
  bool adds_;
  const std::byte* data_;
  std::byte* out_;
  std::size_t row_bytes_;
  std::size_t bytes_;  // of x
  std::size_t out_bytes_;
  StepMessage head_;
  std::vector<std::vector<std::size_t>> shown_;  // [R]: rows that others read, each once
  std::vector<Read> reads_{};                    // of this rank, by the row of `out`
  std::size_t slot_ = 0;                         // bytes of a row in a round
  std::size_t window_ = 0;                       // of this round, in the staging buffer
};

}  // namespace

void run_rows(HostCollectives& all, const ConstTensorView& x, const TensorView& out,
              const RowTable& table) {
  Rows(all, x, out, table).run();
}

}  // namespace ferry::host
