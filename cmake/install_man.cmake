# gradwire(3), gradwire_mpi(3), and for each function of the C headers a page that includes its header's.
set(man3_dir ${CMAKE_INSTALL_MANDIR}/man3)

function(gradwire_install_man name)
  install(FILES ${PROJECT_SOURCE_DIR}/man/${name}.3 DESTINATION ${man3_dir})
  file(STRINGS ${PROJECT_SOURCE_DIR}/include/gradwire/${name}.h declarations REGEX "^GW_API ")
  foreach(declaration IN LISTS declarations)
    string(REGEX MATCH "gw_[a-z0-9_]+\\(" function "${declaration}")
    string(REPLACE "(" "" function "${function}")
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/man/${function}.3 CONTENT ".so man3/${name}.3\n")
    install(FILES ${PROJECT_BINARY_DIR}/man/${function}.3 DESTINATION ${man3_dir})
  endforeach()
endfunction()

gradwire_install_man(gradwire)
if(GRADWIRE_HAS_MPI)
  gradwire_install_man(gradwire_mpi)
endif()
