# gradwire::mpi is built where an MPI is found.
set(GRADWIRE_MPI AUTO CACHE STRING "The MPI engine: ON, OFF, or AUTO: where MPI is found")
set_property(CACHE GRADWIRE_MPI PROPERTY STRINGS AUTO ON OFF)

set(GRADWIRE_HAS_MPI OFF)
set(MPI_CXX_SKIP_MPICXX ON) # MPI 3 removed the C++ bindings
if(GRADWIRE_MPI STREQUAL "AUTO")
  find_package(MPI COMPONENTS CXX)
elseif(GRADWIRE_MPI)
  find_package(MPI REQUIRED COMPONENTS CXX)
endif()
if(GRADWIRE_MPI AND MPI_CXX_FOUND)
  set(GRADWIRE_HAS_MPI ON)
  message(STATUS "gradwire: the MPI engine is built, with MPI ${MPI_CXX_VERSION} (${MPI_CXX_COMPILER})")
else()
  message(STATUS "gradwire: the MPI engine is not built (GRADWIRE_MPI is ${GRADWIRE_MPI}; MPI found: ${MPI_CXX_FOUND})")
endif()
