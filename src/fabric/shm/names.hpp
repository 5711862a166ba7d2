// Names of shared memory objects.
#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "fabric/segment_handle.hpp"
#include "platform/process.hpp"

namespace ferry::fabric {

/// SipHash-2-4 of two words: without the key nobody predicts it.
/// (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012.)
std::uint64_t siphash(const JobKey& key, std::uint64_t first, std::uint64_t second);

inline constexpr std::string_view kObjectPrefix = "ferry-";

/// "/ferry-<pid namespace>.<pid>.<start time>-<32 hex digits>". The first part tells whose it is,
/// so that what a dead process left can be found; the digits depend on the job's key, so that
/// nobody else can have taken the name before.
std::string object_name(const JobKey& key, const ProcessName& owner, int rank, SegmentId segment);

/// The owner in a name, without the leading slash; nothing if Ferry did not make the name.
std::optional<ProcessName> owner_of(std::string_view name);

/// The part of a name, without the leading slash, that all objects of a process share.
std::string owner_prefix(const ProcessName& owner);

/// Removes the objects in /dev/shm that belong to this user and to processes, of this pid
/// namespace, that no longer run. Returns how many.
std::size_t remove_orphans() noexcept;

}  // namespace ferry::fabric
