#include "core/comm/nccl/nccl_channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp::comm {
namespace {

// How often the store is asked whether the other side has begun.
constexpr std::chrono::milliseconds kLookInterval{5};

}  // namespace

Posting::Posting(NcclGroup& group, MemoryView data_, int source_, std::uint64_t tag_, const Call& call)
    : data(data_),
      source(source_),
      tag(tag_),
      deadline(call.deadline),
      location(call.location),
      ready(group.context().device) {
  ready.record(group.caller_stream());
}

void Posting::end(std::exception_ptr why) {
  if (!ended.load(std::memory_order_relaxed)) {
    error = std::move(why);
    ended.store(true, std::memory_order_release);
  }
}

std::string Posting::describe() const {
  return std::to_string(data.count) + " " + name(data.dtype) + " with tag " + std::to_string(tag) +
         (location.empty() ? "" : " at " + location);
}

NcclChannel::NcclChannel(NcclGroup& group, int source, int destination)
    : group_(group),
      device_header_(group.context().device, MemoryKind::kDevice, sizeof(Header)),
      header_(group.context().device, MemoryKind::kPinned, sizeof(Header)),
      source_(source),
      destination_(destination) {}

// The source makes the id, so that a receive that nobody answers costs the source nothing.
std::optional<NcclUniqueId> NcclChannel::find_id() {
  const std::string key = "/channel/" + std::to_string(source_) + "-" + std::to_string(destination_);
  const NcclApi& api = *group_.context().api;
  NcclUniqueId id{};
  if (group_.rank() == source_) {
    api.check(api.get_unique_id(&id), "ncclGetUniqueId");
    group_.board().publish(key, std::string(id.bytes, sizeof(id.bytes)));
    return id;
  }
  const auto now = std::chrono::steady_clock::now();
  if (now < next_look_) {
    return std::nullopt;
  }
  next_look_ = now + kLookInterval;
  const std::optional<std::string> text = group_.board().look(key);
  if (!text.has_value()) {
    return std::nullopt;
  }
  if (text->size() != sizeof(id.bytes)) {
    throw PeerLost("the NCCL id of the channel from rank " + std::to_string(source_) + " to rank " +
                   std::to_string(destination_) + " has " + std::to_string(text->size()) + " bytes, expected " +
                   std::to_string(sizeof(id.bytes)));
  }
  std::memcpy(id.bytes, text->data(), sizeof(id.bytes));
  return id;
}

bool NcclChannel::connect() {
  if (connected_) {
    return true;
  }
  if (link_ == nullptr) {
    const std::optional<NcclUniqueId> id = find_id();
    if (!id.has_value()) {
      return false;
    }
    link_ = std::make_unique<NcclLink>(group_.context(), *id, group_.rank() == source_ ? 0 : 1, 2);
  }
  connected_ = link_->settled();
  return connected_;
}

void NcclChannel::send(const void* data, std::size_t size_bytes) {
  link_->issue("ncclSend", [=](const NcclApi& api, NcclComm comm, CudaStream stream) {
    return api.send(data, size_bytes, NcclDataType::kUint8, 1, comm, stream);
  });
}

void NcclChannel::receive(void* data, std::size_t size_bytes) {
  link_->issue("ncclRecv", [=](const NcclApi& api, NcclComm comm, CudaStream stream) {
    return api.receive(data, size_bytes, NcclDataType::kUint8, 0, comm, stream);
  });
}

void NcclChannel::abort() noexcept {
  if (link_ != nullptr) {
    link_->abort();
  }
}

void NcclChannel::retire() noexcept {
  if (link_ != nullptr) {
    link_->retire();
  }
}

void OutgoingChannel::advance() {
  while (!queue_.empty() && connect() && take_step(*queue_.front())) {
  }
}

// Whether there may be more to do at once.
bool OutgoingChannel::take_step(Posting& front) {
  switch (step_) {
    case Step::kIdle: {
      const Header header{front.tag, front.data.count, static_cast<std::uint64_t>(front.data.dtype), 0};
      std::memcpy(header_.data(), &header, sizeof(header));
      link_->wait_for(front.ready);
      link_->stream().copy(device_header_.data(), header_.data(), sizeof(header));
      send(device_header_.data(), sizeof(header));
      step_ = Step::kHeader;
      return true;
    }
    case Step::kHeader:
      if (!link_->settled()) {
        return false;
      }
      if (front.data.count > 0) {
        send(front.data.data, front.data.size_bytes());
      }
      step_ = Step::kData;
      return true;
    case Step::kData:
      if (!link_->settled()) {
        return false;
      }
      link_->mark();
      step_ = Step::kEnd;
      return true;
    case Step::kEnd:
      if (!link_->finished()) {
        return false;
      }
      front.end();
      queue_.pop_front();
      step_ = Step::kIdle;
      return true;
  }
  return false;
}

IncomingChannel::IncomingChannel(NcclGroup& group, int source)
    : NcclChannel(group, source, group.rank()), copy_stream_(group.context().device) {}

bool IncomingChannel::fits(const Posting& posting, const Header& header) {
  return posting.data.count == header.count && static_cast<std::uint64_t>(posting.data.dtype) == header.dtype;
}

// Ends a receive whose message has come, or with what the message was instead.
void IncomingChannel::deliver(const SharedPosting& posting, const Header& header) {
  if (fits(*posting, header)) {
    posting->end();
    return;
  }
  posting->end(std::make_exception_ptr(MismatchedCollective(
      "receive of " + posting->describe() + " on rank " + std::to_string(group_.rank()) + " from rank " +
      std::to_string(peer()) + ": the message has " + std::to_string(header.count) + " elements of " +
      name(static_cast<DType>(header.dtype)) + ". Both sides must name the same dtype and count")));
}

void IncomingChannel::post(SharedPosting posting) {
  const auto early = std::find_if(early_.begin(), early_.end(),
                                  [&](const Early& message) { return message.header.tag == posting->tag; });
  if (early == early_.end()) {
    waiting_.push_back(std::move(posting));
    return;
  }
  if (!fits(*posting, early->header)) {
    deliver(posting, early->header);
    spare_.push_back(std::move(early->data));
  } else {
    auto end = std::make_unique<DeviceEvent>(group_.context().device);
    posting->ready.hold_back(copy_stream_.get());
    copy_stream_.copy(posting->data.data, early->data->data(), posting->data.size_bytes());
    end->record(copy_stream_.get());
    copies_.push_back({std::move(posting), std::move(early->data), std::move(end)});
  }
  early_.erase(early);
}

void IncomingChannel::finish_copies() {
  while (!copies_.empty() && copies_.front().end->passed()) {
    copies_.front().posting->end();
    spare_.push_back(std::move(copies_.front().data));
    copies_.pop_front();
  }
}

void IncomingChannel::advance() {
  finish_copies();
  while ((step_ != Step::kIdle || !waiting_.empty()) && connect() && take_step()) {
  }
}

std::list<SharedPosting> IncomingChannel::pending() const {
  std::list<SharedPosting> all = waiting_;
  for (const Copy& copy : copies_) {
    all.push_back(copy.posting);
  }
  if (target_ != nullptr) {
    all.push_back(target_);
  }
  return all;
}

// Whether there may be more to do at once.
bool IncomingChannel::take_step() {
  switch (step_) {
    case Step::kIdle:
      receive(device_header_.data(), sizeof(Header));
      step_ = Step::kHeader;
      return true;
    case Step::kHeader:
      if (!link_->settled()) {
        return false;
      }
      link_->stream().copy(header_.data(), device_header_.data(), sizeof(Header));
      link_->mark();
      step_ = Step::kReadHeader;
      return true;
    case Step::kReadHeader:
      if (!link_->finished()) {
        return false;
      }
      std::memcpy(&current_, header_.data(), sizeof(current_));
      let_data_come();
      step_ = Step::kData;
      return true;
    case Step::kData:
      if (!link_->settled()) {
        return false;
      }
      link_->mark();
      step_ = Step::kEnd;
      return true;
    case Step::kEnd:
      if (!link_->finished()) {
        return false;
      }
      finish_message();
      step_ = Step::kIdle;
      return true;
  }
  return false;
}

SharedPosting IncomingChannel::take_waiting(std::uint64_t tag) {
  const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                  [tag](const SharedPosting& waiting) { return waiting->tag == tag; });
  if (found == waiting_.end()) {
    return nullptr;
  }
  SharedPosting posting = *found;
  waiting_.erase(found);
  return posting;
}

void IncomingChannel::let_data_come() {
  if (current_.dtype >= kNumDTypes) {
    throw PeerLost("rank " + std::to_string(peer()) + " sent a message of the unknown element type " +
                   std::to_string(current_.dtype) + ": it runs another version of this library");
  }
  target_ = take_waiting(current_.tag);
  const std::size_t size_bytes = current_.count * element_size(static_cast<DType>(current_.dtype));
  void* destination = nullptr;
  if (target_ != nullptr && fits(*target_, current_)) {
    link_->wait_for(target_->ready);
    destination = target_->data.data;
  } else {
    scratch_ = memory_for(size_bytes);
    destination = scratch_->data();
  }
  if (size_bytes > 0) {
    receive(destination, size_bytes);
  }
}

void IncomingChannel::finish_message() {
  if (target_ == nullptr) {
    early_.push_back({current_, std::move(scratch_)});
    // Its receive may have been posted while the data were on their way.
    if (SharedPosting late = take_waiting(current_.tag)) {
      post(std::move(late));
    }
    return;
  }
  if (scratch_ != nullptr) {
    spare_.push_back(std::move(scratch_));
  }
  deliver(std::exchange(target_, nullptr), current_);
}

std::unique_ptr<CudaMemory> IncomingChannel::memory_for(std::size_t size_bytes) {
  const auto spare = std::find_if(spare_.begin(), spare_.end(), [&](const std::unique_ptr<CudaMemory>& memory) {
    return memory->size_bytes() >= size_bytes;
  });
  if (spare == spare_.end()) {
    return std::make_unique<CudaMemory>(group_.context().device, MemoryKind::kDevice, size_bytes);
  }
  std::unique_ptr<CudaMemory> memory = std::move(*spare);
  spare_.erase(spare);
  return memory;
}

}  // namespace accelerate_cpp::comm
