# Each dependency comes from the system's packages if they are installed; else it is fetched. With
# GRADWIRE_BUNDLED, Highway and xxHash come from third_party/, where scripts/vendor.py puts them;
# sdist and source tarball have them.
include(FetchContent)
set(FETCHCONTENT_TRY_FIND_PACKAGE_MODE OPT_IN)

find_package(Threads REQUIRED)

set(GRADWIRE_THIRD_PARTY ${PROJECT_SOURCE_DIR}/third_party CACHE PATH "See GRADWIRE_BUNDLED")
set(has_third_party OFF)
if(EXISTS ${GRADWIRE_THIRD_PARTY}/highway AND EXISTS ${GRADWIRE_THIRD_PARTY}/xxhash)
  set(has_third_party ON)
endif()
option(GRADWIRE_BUNDLED "Highway and xxHash from GRADWIRE_THIRD_PARTY, linked in"
  ${has_third_party})
if(GRADWIRE_BUNDLED AND NOT has_third_party)
  message(FATAL_ERROR "GRADWIRE_BUNDLED is ON, but Highway and xxHash are not in "
    "${GRADWIRE_THIRD_PARTY}: run scripts/vendor.py ${GRADWIRE_THIRD_PARTY}, or leave "
    "GRADWIRE_BUNDLED off")
endif()

# gradwire_third_party(key variable): sets the variable to FetchContent's arguments for an entry of
# third_party.json.
function(gradwire_third_party key variable)
  file(READ ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/third_party.json json)
  string(JSON url GET "${json}" ${key} url)
  string(JSON sha256 GET "${json}" ${key} sha256)
  set(${variable} URL ${url} URL_HASH SHA256=${sha256} DOWNLOAD_EXTRACT_TIMESTAMP ON PARENT_SCOPE)
endfunction()

# Without these policies Highway's own options would replace the settings below.
set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)
set(CMAKE_POLICY_DEFAULT_CMP0126 NEW)
set(HWY_ENABLE_TESTS OFF)
set(HWY_ENABLE_EXAMPLES OFF)
set(HWY_ENABLE_CONTRIB OFF)
# A Highway that is not the system's becomes part of a shared gradwire; with a static gradwire it is
# installed too.
set(HWY_FORCE_STATIC_LIBS ON)
if(BUILD_SHARED_LIBS OR NOT GRADWIRE_INSTALL)
  set(HWY_ENABLE_INSTALL OFF)
endif()
gradwire_third_party(hwy hwy_archive)
if(GRADWIRE_BUNDLED)
  set(FETCHCONTENT_SOURCE_DIR_HWY ${GRADWIRE_THIRD_PARTY}/highway)
  FetchContent_Declare(hwy ${hwy_archive} SYSTEM)
else()
  FetchContent_Declare(hwy ${hwy_archive} SYSTEM FIND_PACKAGE_ARGS CONFIG)
endif()
FetchContent_MakeAvailable(hwy)
if(NOT TARGET hwy::hwy)
  add_library(hwy::hwy ALIAS hwy)
  set_target_properties(hwy_test hwy_list_targets PROPERTIES EXCLUDE_FROM_ALL ON)
  file(READ ${CMAKE_CURRENT_LIST_DIR}/third_party.json json)
  string(JSON hwy_VERSION GET "${json}" hwy version)
endif()

# Only the header of xxHash is used (XXH_INLINE_ALL).
if(GRADWIRE_BUNDLED)
  set(GRADWIRE_XXHASH_INCLUDE ${GRADWIRE_THIRD_PARTY}/xxhash)
else()
  find_path(GRADWIRE_XXHASH_INCLUDE xxhash.h)
endif()
if(NOT GRADWIRE_XXHASH_INCLUDE)
  gradwire_third_party(xxhash xxhash_archive)
  FetchContent_Declare(xxhash ${xxhash_archive})
  FetchContent_Populate(xxhash)
  set(GRADWIRE_XXHASH_INCLUDE ${xxhash_SOURCE_DIR})
endif()
add_library(gradwire_xxhash INTERFACE)
target_include_directories(gradwire_xxhash SYSTEM INTERFACE ${GRADWIRE_XXHASH_INCLUDE})

if(GRADWIRE_TESTS)
  set(INSTALL_GTEST OFF)
  FetchContent_Declare(googletest
    GIT_REPOSITORY https://github.com/google/googletest.git
    GIT_TAG v1.14.0
    GIT_SHALLOW ON
    FIND_PACKAGE_ARGS NAMES GTest)
  FetchContent_MakeAvailable(googletest)
endif()

if(GRADWIRE_BENCH)
  set(BENCHMARK_ENABLE_TESTING OFF)
  set(BENCHMARK_ENABLE_INSTALL OFF)
  FetchContent_Declare(benchmark
    GIT_REPOSITORY https://github.com/google/benchmark.git
    GIT_TAG v1.8.3
    GIT_SHALLOW ON
    FIND_PACKAGE_ARGS)
  FetchContent_MakeAvailable(benchmark)
endif()
