// The store's frame parser and the decoders of its payloads, on arbitrary bytes. Beside "no crash":
// however the bytes are cut, the same frames and the same error come out; no frame breaks the
// limits; memory follows what was fed.
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <vector>

#include "bootstrap/frame_queue.hpp"
#include "bootstrap/store_messages.hpp"
#include "fuzz_input.hpp"

namespace {

using namespace ferry::bootstrap;
using ferry::fuzz::Input;

struct Outcome {
  std::vector<Frame> frames;
  FrameError error = FrameError::none;
};

void check(bool good) {
  if (!good) std::abort();
}

void decode_all(std::span<const std::byte> payload) {
  if (const auto hello = decode_hello(payload)) check(encode(*hello).size() == payload.size());
  if (const auto refusal = decode_refusal(payload))
    check(encode(*refusal).size() == payload.size());
  if (const auto farewell = decode_farewell(payload)) check(encode(*farewell).size() == 4);
  if (const auto absences = decode_absences(payload)) {
    check(absences->absent.listed.size() <= RankList::kListed);
    check(absences->silent.listed.size() <= RankList::kListed);
    absences->first();
  }
  if (const auto failure = decode_failure(payload))
    check(encode(*failure).size() == payload.size());
}

Outcome parse(std::span<const std::byte> bytes, const std::optional<Digest>& key, Input cuts) {
  Outcome out;
  FrameParser parser;
  if (key) parser.authenticate(*key);
  while (!bytes.empty() && parser.error() == FrameError::none) {
    const std::size_t step = cuts.empty() ? bytes.size() : 1 + cuts.below(64);
    const std::size_t taken = parser.feed(bytes.first(std::min(step, bytes.size())));
    check(taken > 0 || parser.error() != FrameError::none);
    bytes = bytes.subspan(taken);
    check(parser.announced() <= kMaxMessageBytes);
    if (auto frame = parser.take()) {
      check(frame->payload.size() == frame->header.length);
      decode_all(frame->payload);
      out.frames.push_back(std::move(*frame));
    }
  }
  out.error = parser.error();
  return out;
}

// Well-formed frames with contents of the fuzzer's, then raw bytes.
std::vector<std::byte> stream(Input& input, const std::optional<Digest>& key) {
  FrameQueue queue;
  if (key) queue.authenticate(*key);
  for (std::size_t frames = input.below(4); frames > 0; --frames) {
    FrameHeader header{
        .type = FrameType(input.below(14)), .sequence = input.word(), .rank = input.word()};
    header.version = std::uint16_t(kStoreVersion + (input.below(16) == 1));
    const auto payload = input.piece(input.below(80));
    queue.push(header, std::vector<std::byte>(payload.begin(), payload.end()));
  }
  std::vector<std::byte> bytes;
  while (!queue.empty()) {
    const auto piece = queue.front();
    bytes.insert(bytes.end(), piece.begin(), piece.end());
    queue.written(piece.size());
  }
  bytes.insert(bytes.end(), input.rest().begin(), input.rest().end());
  return bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  std::optional<Digest> key;
  if (input.byte() & 1) key = Digest{};
  const std::vector<std::byte> bytes = stream(input, key);
  decode_all(bytes);
  const Outcome whole = parse(bytes, key, Input(nullptr, 0));
  const Outcome cut = parse(bytes, key, Input(data, size));
  check(whole.error == cut.error && whole.frames.size() == cut.frames.size());
  for (std::size_t i = 0; i < whole.frames.size(); ++i) {
    check(whole.frames[i].header.type == cut.frames[i].header.type);
    check(whole.frames[i].payload == cut.frames[i].payload);
  }
  return 0;
}
