// The arithmetic of collectives: over the ranks of a domain, then over the domains.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "ferry/collectives.hpp"
#include "ferry/dtype.hpp"

namespace ferry::host {

/// A reduction over all ranks. Elements that are rounded (f32, bf16, f16) have f32 partial results,
/// one for each domain; the others have partial results of their own type.
struct Reduction {
  ReduceOp op = ReduceOp::sum;
  Dtype dtype = Dtype::f32;  ///< of the elements and of the result
  int ranks = 1;             ///< by which a mean divides

  Dtype partial_dtype() const {
    return dtype == Dtype::bf16 || dtype == Dtype::f16 ? Dtype::f32 : dtype;
  }
  /// Of so many elements, and of their partial results.
  std::size_t bytes(std::int64_t elements) const {
    return static_cast<std::size_t>(elements) * size_of(dtype);
  }
  std::size_t partial_bytes(std::int64_t elements) const {
    return static_cast<std::size_t>(elements) * size_of(partial_dtype());
  }
};

/// `count` elements of each row in ascending order of the rows: to a domain's partial results.
void reduce_ranks(const Reduction& reduction, std::span<const void* const> rows, std::int64_t count,
                  void* partial);
/// Of each domain in ascending order: to results, which every one of `outs` gets.
void reduce_domains(const Reduction& reduction, std::span<const void* const> partials,
                    std::int64_t count, std::span<void* const> outs);
/// Both at once where there is one domain; an element of `outs` may be one of the rows.
void reduce_all(const Reduction& reduction, std::span<const void* const> rows, std::int64_t count,
                std::span<void* const> outs);

}  // namespace ferry::host
