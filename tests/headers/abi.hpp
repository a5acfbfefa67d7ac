// Compares C declarations by what matters to a caller: sizes, signedness, layout, exported names. Types of the two sides have different names.
#pragma once
#include <cstddef>
#include <type_traits>

namespace abi {

struct Opaque;
template <size_t size, bool is_signed>
struct Integer;
template <size_t size, size_t alignment>
struct Record;

template <class T, class = void>
struct IsComplete : std::false_type {};
template <class T>
struct IsComplete<T, std::void_t<decltype(sizeof(T))>> : std::true_type {};

// Form<T>::type is the same for two types that are passed alike.
template <class T, class = void>
struct Form {
  using type = Record<sizeof(T), alignof(T)>;
};
template <>
struct Form<void> {
  using type = void;
};
template <>
struct Form<char> {  // text, not a number
  using type = char;
};
template <class T>
struct Form<T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, char>>> {
  using type = Integer<sizeof(T), std::is_signed_v<T>>;
};
template <class T>
struct Form<T, std::enable_if_t<std::is_enum_v<T>>> {  // an enum is passed as an int, whatever type the compiler chose for it
  using type = Integer<sizeof(T), true>;
};

template <class T>
constexpr bool is_opaque = std::is_void_v<T> || (std::is_class_v<T> && !IsComplete<T>::value);

template <class T, bool opaque = is_opaque<T>>
struct Target {
  using type = Opaque;
};
template <class T>
struct Target<T, false> {
  using type = typename Form<T>::type;
};

template <class T>
struct Form<T, std::enable_if_t<std::is_pointer_v<T>>> {
  using type = typename Target<std::remove_cv_t<std::remove_pointer_t<T>>>::type *;
};

template <class Function>
struct Signature;
template <class Result, class... Arguments>
struct Signature<Result (*)(Arguments...)> {
  using type = typename Form<Result>::type (*)(typename Form<Arguments>::type...);
};
template <class Result, class... Arguments>
struct Signature<Result (*)(Arguments...) noexcept> : Signature<Result (*)(Arguments...)> {};

template <class A, class B>
constexpr bool same_signature = std::is_same_v<typename Signature<A>::type, typename Signature<B>::type>;

constexpr bool same_text(const char *a, const char *b) {
  while (*a != '\0' && *a == *b) ++a, ++b;
  return *a == *b;
}

}  // namespace abi

#define ABI_TEXT_OF(name) #name
#define ABI_TEXT(name) ABI_TEXT_OF(name)

// The vendor's headers rename functions by macros; the name after that is the symbol that the library exports.
#define ABI_SAME_FUNCTION(name, symbol, need, result, ...)                                                     \
  static_assert(abi::same_text(ABI_TEXT(name), symbol), "exported symbol of " #name);                          \
  static_assert(abi::same_signature<decltype(&::name), result (*)(__VA_ARGS__)>, "signature of " #name);

#define ABI_SAME_VALUE(name, number, vendor_name) static_assert(static_cast<long long>(vendor_name) == number, "value of " #name);

#define ABI_SAME_SIZE(theirs, ours) static_assert(sizeof(theirs) == sizeof(ours) && alignof(theirs) == alignof(ours), "size of " #ours)

#define ABI_SAME_FIELD(theirs, their_field, ours, our_field)                                                                      \
  static_assert(offsetof(theirs, their_field) == offsetof(ours, our_field) &&                                                     \
                    sizeof(static_cast<theirs *>(nullptr)->their_field) == sizeof(static_cast<ours *>(nullptr)->our_field),       \
                "field " #our_field " of " #ours)
