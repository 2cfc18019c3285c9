#include "core/comm/call_record.h"

#include <cstring>
#include <type_traits>

namespace accelerate_cpp::comm {
namespace {

// Whether two ranks ask for the same operation, sizes of pairs aside.
bool same_operation(const CallRecord& a, const CallRecord& b) {
  return a.agrees_with(b, !a.gives.empty());
}

// Scrambles a word so that sums of scrambled words collide only by chance.
std::uint64_t scramble(std::uint64_t word) {
  word += 0x9e3779b97f4a7c15u;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
  return word ^ (word >> 31);
}

class Writer {
 public:
  template <class T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    text.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  std::string text;
};

class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}

  template <class T>
  T take() {
    T value{};
    ok_ = ok_ && text_.size() - at_ >= sizeof(T);
    if (ok_) {
      std::memcpy(&value, text_.data() + at_, sizeof(T));
      at_ += sizeof(T);
    }
    return value;
  }
  std::vector<std::uint64_t> take_list() {
    const auto size = take<std::uint64_t>();
    ok_ = ok_ && size <= (text_.size() - at_) / sizeof(std::uint64_t);
    std::vector<std::uint64_t> list;
    for (std::uint64_t i = 0; ok_ && i < size; ++i) {
      list.push_back(take<std::uint64_t>());
    }
    return list;
  }
  std::string take_rest() { return text_.substr(at_); }
  bool ok() const { return ok_; }

 private:
  const std::string& text_;
  std::size_t at_ = 0;
  bool ok_ = true;
};

constexpr std::uint32_t kEncoding = 0x63616c31;

}  // namespace

std::string CallRecord::encode() const {
  Writer writer;
  writer.put(kEncoding);
  writer.put(static_cast<const CallSignature&>(*this));
  for (const std::vector<std::uint64_t>* list : {&gives, &expects}) {
    writer.put(static_cast<std::uint64_t>(list->size()));
    for (const std::uint64_t element : *list) {
      writer.put(element);
    }
  }
  return writer.text + location;
}

std::optional<CallRecord> CallRecord::decode(const std::string& text) {
  Reader reader(text);
  if (reader.take<std::uint32_t>() != kEncoding) {
    return std::nullopt;
  }
  CallRecord record(CallKind::kBarrier);
  static_cast<CallSignature&>(record) = reader.take<CallSignature>();
  record.gives = reader.take_list();
  record.expects = reader.take_list();
  if (!reader.ok() || static_cast<int>(record.dtype) >= kNumDTypes) {
    return std::nullopt;
  }
  record.location = reader.take_rest();
  return record;
}

CallDigest::CallDigest(const CallRecord& record, int rank) {
  const auto mix = [this](std::uint64_t word) { common = scramble(common ^ word); };
  for (const int word : {static_cast<int>(record.kind), static_cast<int>(record.dtype), static_cast<int>(record.op),
                         static_cast<int>(record.root)}) {
    mix(static_cast<std::uint64_t>(word));
  }
  if (record.gives.empty()) {
    mix(record.count);
    mix(static_cast<std::uint64_t>(record.shape.dimensions));
    for (int d = 0; d < record.shape.dimensions; ++d) {
      mix(static_cast<std::uint64_t>(record.shape.sizes[d]));
    }
  }
  const auto own = static_cast<std::uint64_t>(rank);
  const auto transfer = [](std::uint64_t from, std::uint64_t to, std::uint64_t elements) {
    return scramble(scramble(from << 32 | to) ^ elements);
  };
  for (std::size_t peer = 0; peer < record.gives.size(); ++peer) {
    balance += transfer(own, peer, record.gives[peer]);
    balance -= transfer(peer, own, record.expects[peer]);
  }
}

bool fit_together(const std::vector<CallDigest>& digests) {
  std::uint64_t balance = 0;
  for (const CallDigest& digest : digests) {
    if (digest.common != digests.front().common) {
      return false;
    }
    balance += digest.balance;
  }
  return balance == 0;
}

std::optional<std::string> find_contradiction(const KnownCalls& calls, const WaitHooks& names) {
  const auto sentence = [&](std::size_t a, std::size_t b, const std::string& what) {
    return names.name_of(static_cast<int>(a)) + " and " + names.name_of(static_cast<int>(b)) + " " + what;
  };
  for (std::size_t a = 0; a < calls.size(); ++a) {
    for (std::size_t b = 0; b < calls.size(); ++b) {
      if (!calls[a].has_value() || !calls[b].has_value()) {
        continue;
      }
      if (!same_operation(*calls[a], *calls[b])) {
        return sentence(a, b, "ask for different operations");
      }
      const bool sized = calls[a]->gives.size() == calls.size() && calls[b]->expects.size() == calls.size();
      if (sized && calls[a]->gives[b] != calls[b]->expects[a]) {
        return sentence(a, b,
                        "disagree about a size: " + std::to_string(calls[a]->gives[b]) + " elements are given, " +
                            std::to_string(calls[b]->expects[a]) + " expected");
      }
    }
  }
  return std::nullopt;
}

std::string table_of(const KnownCalls& calls, const WaitHooks& names) {
  std::string table;
  for (std::size_t rank = 0; rank < calls.size(); ++rank) {
    table += "\n  " + names.name_of(static_cast<int>(rank)) + ": ";
    if (!calls[rank].has_value()) {
      table += "not known to wait in this operation";
      continue;
    }
    const CallSite site(calls[rank]->location);
    table += site.name(calls[rank]->describe(names)) + site.suffix();
  }
  return table;
}

}  // namespace accelerate_cpp::comm
