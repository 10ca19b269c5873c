# Writes a header to OUT that names the commit of SOURCE, if it has changed. An archive made by git
# has the commit in commit.txt; elsewhere git is asked, and without git the commit is "unknown".
file(STRINGS ${SOURCE}/cmake/commit.txt commit)
if(commit MATCHES "Format")
  execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --exclude=*
    OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(failed OR commit STREQUAL "")
    set(commit unknown)
  endif()
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT "#pragma once\n#define GRADWIRE_COMMIT \"@commit@\"\n" @ONLY)
