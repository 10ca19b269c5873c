# What `cmake --install` installs: headers, the library (shared, or static without
# BUILD_SHARED_LIBS), the CMake package, gradwire.pc and gradwire_mpi.pc, manual pages of section 3.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# Until 1.0 each minor version may change the interface of the library.
set(gradwire_soversion ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})

# What the linkers call a library's own folder, and the C++ library that compilers bring.
set(own_folder "$ORIGIN")
set(cxx_library stdc++)
if(APPLE)
  set(own_folder "@loader_path")
  set(cxx_library c++)
endif()

# gradwire_shared_library(target name): makes the target lib<name>.so, which has a version and exports
# only the symbols of gradwire.map. On macOS it exports what the compiler has not hidden.
function(gradwire_shared_library target name)
  if(NOT APPLE)
    set(symbol_map ${PROJECT_BINARY_DIR}/gradwire.map)
    configure_file(${PROJECT_SOURCE_DIR}/cmake/gradwire.map.in ${symbol_map} @ONLY)
    set_target_properties(${target} PROPERTIES LINK_DEPENDS ${symbol_map})
    target_link_options(${target} PRIVATE
      LINKER:--version-script=${symbol_map} ${gradwire_link_options})
    if(NOT GRADWIRE_SANITIZE)
      target_link_options(${target} PRIVATE LINKER:--no-undefined)
    endif()
  endif()
  set_target_properties(${target} PROPERTIES
    LINKER_LANGUAGE CXX
    VERSION ${PROJECT_VERSION}
    SOVERSION ${gradwire_soversion}
    OUTPUT_NAME ${name}
    EXPORT_NAME ${name})
endfunction()

# The tests link the static library, because they call private functions. The shared library is
# made of the same objects.
if(BUILD_SHARED_LIBS)
  set(installed_library gradwire_shared)
  add_library(gradwire_shared SHARED $<TARGET_OBJECTS:gradwire>)
  target_link_libraries(gradwire_shared
    PRIVATE $<BUILD_INTERFACE:hwy::hwy> $<BUILD_INTERFACE:Threads::Threads>)
  gradwire_shared_library(gradwire_shared gradwire)
else()
  set(installed_library gradwire)
endif()
target_include_directories(${installed_library}
  INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_features(${installed_library} INTERFACE cxx_std_20)

install(TARGETS ${installed_library} EXPORT gradwire_targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
set(no_headers "")
if(NOT GRADWIRE_HAS_MPI)
  list(APPEND no_headers PATTERN "*mpi.h" EXCLUDE)
endif()
if(NOT GRADWIRE_HAS_CUDA)
  list(APPEND no_headers PATTERN "cuda.h" EXCLUDE)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/gradwire DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h" PATTERN "*.def" ${no_headers})

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/gradwire)

# gradwire_install_part(part library...): installs gradwire_<part>, which uses gradwire and these
# libraries, as gradwire::<part>.
function(gradwire_install_part part)
  set(installed gradwire_${part})
  set_target_properties(${installed} PROPERTIES EXPORT_NAME ${part})
  if(BUILD_SHARED_LIBS)
    set(installed gradwire_${part}_shared)
    add_library(${installed} SHARED $<TARGET_OBJECTS:gradwire_${part}>)
    target_link_libraries(${installed} PUBLIC gradwire_shared ${ARGN})
    gradwire_shared_library(${installed} gradwire_${part})
    # libgradwire.so is in the same folder.
    set_target_properties(${installed} PROPERTIES EXPORT_NAME ${part} INSTALL_RPATH "${own_folder}")
  endif()
  install(TARGETS ${installed} EXPORT gradwire_${part}_targets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT gradwire_${part}_targets NAMESPACE gradwire:: DESTINATION ${package_dir})
endfunction()

install(EXPORT gradwire_targets NAMESPACE gradwire:: DESTINATION ${package_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/gradwire-config.cmake.in
  ${PROJECT_BINARY_DIR}/gradwire-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/gradwire-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/gradwire-config.cmake
  ${PROJECT_BINARY_DIR}/gradwire-config-version.cmake
  DESTINATION ${package_dir})

# The paths in gradwire.pc are relative to its folder, so that `cmake --install --prefix` works.
set(pc_dir ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH pc_prefix ${pc_dir} ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" pc_prefix ${pc_prefix})
file(RELATIVE_PATH pc_libdir ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_LIBDIR})
file(RELATIVE_PATH pc_includedir ${CMAKE_INSTALL_PREFIX} ${CMAKE_INSTALL_FULL_INCLUDEDIR})
# A C compiler that links the static library needs the libraries of C++ and Highway too.
set(pc_libs "")
if(NOT BUILD_SHARED_LIBS)
  set(pc_libs " -lhwy -l${cxx_library} -lm -pthread")
endif()
configure_file(${CMAKE_CURRENT_LIST_DIR}/gradwire.pc.in ${PROJECT_BINARY_DIR}/gradwire.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/gradwire.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# gradwire_mpi.pc names the flags of the MPI that this build uses, so that plain cc is enough.
if(GRADWIRE_HAS_MPI)
  list(TRANSFORM MPI_CXX_INCLUDE_DIRS PREPEND " -I" OUTPUT_VARIABLE pc_mpi_cflags)
  set(pc_mpi_libs ${MPI_CXX_LIBRARIES})
  list(FILTER pc_mpi_libs EXCLUDE REGEX "mpi_cxx") # gradwire uses no C++ bindings
  list(TRANSFORM pc_mpi_libs PREPEND " ")
  string(REPLACE ";" "" pc_mpi_cflags "${pc_mpi_cflags}")
  string(REPLACE ";" "" pc_mpi_libs "${pc_mpi_libs}")
  configure_file(${CMAKE_CURRENT_LIST_DIR}/gradwire_mpi.pc.in
    ${PROJECT_BINARY_DIR}/gradwire_mpi.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/gradwire_mpi.pc
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()

include(${CMAKE_CURRENT_LIST_DIR}/install_man.cmake)
