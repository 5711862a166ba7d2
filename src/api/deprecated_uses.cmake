# Each line of deprecated_uses.cpp that uses an old name compiles, with a warning.
set(source ${CMAKE_CURRENT_LIST_DIR}/deprecated_uses.cpp)
execute_process(
  COMMAND ${CMAKE_COMMAND} -E env LC_ALL=C ${COMPILER} -std=c++20 -fsyntax-only -I${INCLUDE} ${source}
  ERROR_VARIABLE words COMMAND_ERROR_IS_FATAL ANY)
foreach(line RANGE 3 10)
  if(NOT words MATCHES "deprecated_uses.cpp:${line}:[0-9]+: warning: [^\n]*deprecated")
    message(FATAL_ERROR "line ${line} brought no warning:\n${words}")
  endif()
endforeach()
