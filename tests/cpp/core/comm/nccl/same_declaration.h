// Whether a declaration of ours may stand for one of a header of NVIDIA's: same number of parameters, and each passed
// alike. Names of types differ, so structures are compared by size, and their members elsewhere.
#pragma once

#include <cstddef>
#include <type_traits>

namespace accelerate_cpp::comm::testing {

template <class Ours, class Theirs>
constexpr bool passed_alike() {
  if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using OurTarget = std::remove_pointer_t<Ours>;
    using TheirTarget = std::remove_pointer_t<Theirs>;
    if constexpr (std::is_const_v<OurTarget> != std::is_const_v<TheirTarget>) {
      return false;
    } else if constexpr (std::is_class_v<OurTarget> && std::is_class_v<TheirTarget>) {
      return true;
    } else {
      return passed_alike<std::remove_const_t<OurTarget>, std::remove_const_t<TheirTarget>>();
    }
  } else if constexpr (std::is_enum_v<Ours> && std::is_enum_v<Theirs>) {
    return sizeof(Ours) == sizeof(Theirs);
  } else if constexpr (std::is_class_v<Ours> && std::is_class_v<Theirs>) {
    return sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs) && std::is_trivially_copyable_v<Ours> &&
           std::is_trivially_copyable_v<Theirs>;
  } else {
    return std::is_same_v<Ours, Theirs>;
  }
}

template <class Ours, class Theirs>
struct SameDeclaration : std::false_type {};

template <class OurResult, class... OurParameters, class TheirResult, class... TheirParameters>
struct SameDeclaration<OurResult (*)(OurParameters...), TheirResult (*)(TheirParameters...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(OurParameters) != sizeof...(TheirParameters)) {
      return false;
    } else {
      return passed_alike<OurResult, TheirResult>() && (passed_alike<OurParameters, TheirParameters>() && ...);
    }
  }();
};

template <class Ours, class Theirs>
inline constexpr bool kSameDeclaration = SameDeclaration<Ours, Theirs>::value;

// The comparison itself: what it must tell apart.
namespace same_declaration_check {
struct A;
struct B;
struct Word {
  char bytes[8];
};
struct Long {
  char bytes[16];
};
enum class E : int {};
enum F { kF };
static_assert(kSameDeclaration<E (*)(A*, const void*, E), F (*)(B*, const void*, F)>);
static_assert(!kSameDeclaration<E (*)(A*), F (*)(B*, int)>);
static_assert(!kSameDeclaration<E (*)(int), F (*)(unsigned long)>);
static_assert(!kSameDeclaration<E (*)(const void*), F (*)(void*)>);
static_assert(!kSameDeclaration<E (*)(A**), F (*)(B*)>);
static_assert(!kSameDeclaration<E (*)(Word), F (*)(Long)>);
}  // namespace same_declaration_check

}  // namespace accelerate_cpp::comm::testing
