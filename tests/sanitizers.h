#pragma once

namespace gradwire {

// Whether this program was compiled with ThreadSanitizer, which reports races that a test wants and
// ends programs that start threads after a fork.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#elif defined(__has_feature)
inline constexpr bool kThreadSanitizer = __has_feature(thread_sanitizer);
#else
inline constexpr bool kThreadSanitizer = false;
#endif

}  // namespace gradwire
