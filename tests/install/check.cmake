# Installs Ferry's build into an empty prefix, moves the prefix (it must be relocatable), configures
# the consumer against it with nothing but find_package(ferry), builds it and runs it.
cmake_minimum_required(VERSION 3.25)

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "failed (${result}): ${command}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${FERRY_BUILD} --prefix ${WORK}/first)
file(RENAME ${WORK}/first ${WORK}/prefix)

# Nothing of the inside is installed: only public headers.
file(GLOB_RECURSE headers RELATIVE ${WORK}/prefix/include ${WORK}/prefix/include/*)
foreach(header IN LISTS headers)
  if(NOT header MATCHES "^ferry/[a-z0-9_]+[.]hpp$")
    message(FATAL_ERROR "installed a header that is not public: ${header}")
  endif()
endforeach()

set(configure ${CMAKE_COMMAND} -S ${CONSUMER} -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${COMPILER}
  -DCMAKE_CXX_FLAGS=${FLAGS} -DCMAKE_PREFIX_PATH=${WORK}/prefix)
run(${configure} -B ${WORK}/build -DWANTED_VERSION=${VERSION})
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/consumer)
message(STATUS "the consumer says: ${output}")

# The same without CMake.
find_program(PKG_CONFIG pkg-config)
if(PKG_CONFIG)
  file(GLOB_RECURSE pc ${WORK}/prefix/ferry.pc)
  cmake_path(GET pc PARENT_PATH folder)
  run(${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${folder} ${PKG_CONFIG} --cflags --libs
    "ferry = ${VERSION}")
  separate_arguments(options UNIX_COMMAND "${FLAGS} ${output}")
  run(${COMPILER} ${CONSUMER}/main.cpp ${options} -o ${WORK}/by_pkg_config)
  run(${WORK}/by_pkg_config)
endif()

# A version that is not there is refused.
execute_process(COMMAND ${configure} -B ${WORK}/wrong -DWANTED_VERSION=99.0 RESULT_VARIABLE result
  OUTPUT_QUIET ERROR_QUIET)
if(result EQUAL 0)
  message(FATAL_ERROR "find_package(ferry 99.0) was satisfied by ${VERSION}")
endif()
