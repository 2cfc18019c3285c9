#include "xla_calls/groups.h"

#include <map>
#include <utility>

#include "core/base/error.h"

namespace accelerate_cpp::xla_calls {
namespace {

struct Groups {
  std::mutex mutex;
  std::map<std::int64_t, std::shared_ptr<Group>> by_number;
  std::int64_t next = 1;
};

Groups& groups() {
  static Groups* const instance = new Groups;  // never destroyed: threads of XLA may outlive main()
  return *instance;
}

}  // namespace

std::string Group::text_of(const std::exception_ptr& error) const {
  try {
    std::rethrow_exception(error);
  } catch (const InvalidArgument& e) {
    return std::string("InvalidArgument: ") + e.what();
  } catch (const Timeout& e) {
    return std::string("Timeout: ") + e.what();
  } catch (const PeerLost& e) {
    return std::string("PeerLost: ") + e.what();
  } catch (const MismatchedCollective& e) {
    return std::string("MismatchedCollective: ") + e.what();
  } catch (const SystemFailure& e) {
    return std::string("SystemFailure: ") + e.what();
  } catch (const InternalError& e) {
    return std::string("InternalError: ") + e.what();
  } catch (...) {
    return describe_(error);
  }
}

std::int64_t register_group(std::shared_ptr<Group> group) {
  const std::lock_guard lock(groups().mutex);
  const std::int64_t number = groups().next++;
  groups().by_number.emplace(number, std::move(group));
  return number;
}

std::shared_ptr<Group> group_of(std::int64_t number) {
  const std::lock_guard lock(groups().mutex);
  const auto found = groups().by_number.find(number);
  if (found == groups().by_number.end()) {
    throw InvalidArgument("group " + std::to_string(number) +
                          " of a compiled program is not one of this process: compile the program again, after the "
                          "processes have been joined (jax.clear_caches() forgets it)");
  }
  return found->second;
}

void forget_group(std::int64_t number) {
  const std::lock_guard lock(groups().mutex);
  groups().by_number.erase(number);
}

}  // namespace accelerate_cpp::xla_calls
