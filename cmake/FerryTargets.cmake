# How every Ferry target is compiled. Arithmetic must give the same bits everywhere:
# no contraction, no fast-math (docs/design.md, Arithmetic).
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()
find_package(Threads REQUIRED)

# Not every test has something to show to every sanitizer.
foreach(kind ADDRESS THREAD)
  string(TOLOWER ${kind} word)
  set(FERRY_${kind}_SANITIZER OFF)
  if(CMAKE_CXX_FLAGS MATCHES "fsanitize=[a-z,]*${word}")
    set(FERRY_${kind}_SANITIZER ON)
  endif()
endforeach()

add_library(ferry_options INTERFACE)
# Not for nvcc, which does not know them (FerryCuda.cmake).
target_compile_options(ferry_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-ffp-contract=off;-fno-math-errno;-fno-trapping-math>")
target_include_directories(ferry_options INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>)

# Precompiled headers of the standard library, and for tests of GoogleTest: reading them is more than
# half of compiling a file. A compiler cache shares them, and objects made with them, between builds with
# the same options (host, cuda, the package).
option(FERRY_PCH "Compile with precompiled headers" OFF)
# Most tests compile longer than they run.
set(FERRY_TEST_OPTIONS "" CACHE STRING "Options of the compiler for test programs")

# ferry_make_pch(NAME ADDITIONAL_HEADER...) makes it, with the options of what is to use it: g++ 12
# fails if the level of optimisation differs.
function(ferry_make_pch name)
  add_library(${name} OBJECT ${PROJECT_SOURCE_DIR}/cmake/pch.cpp)
  target_link_libraries(${name} PRIVATE ferry_options Threads::Threads)
  target_precompile_headers(${name} PRIVATE ${PROJECT_SOURCE_DIR}/cmake/pch.hpp ${ARGN})
endfunction()
function(ferry_use_pch target pch)
  if(TARGET ${pch})
    target_precompile_headers(${target} REUSE_FROM ${pch})
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)  # for ccache
    endif()
  endif()
endfunction()
if(FERRY_PCH)
  # Nor does g++ look for memory to use again before a file has taken 1 GB: that takes a seventh of the time.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=1000000>)
  endif()
  ferry_make_pch(ferry_pch)
endif()

# ferry_add_library(core SOURCES a.cpp b.cpp DEPENDS ferry_x ...)
# One object library a folder, so that the shared library, the tests and the tools link the same code.
function(ferry_add_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  if(ARG_SOURCES)
    add_library(ferry_${name} STATIC ${ARG_SOURCES})
    target_link_libraries(ferry_${name} PUBLIC ferry_options Threads::Threads ${ARG_DEPENDS})
    ferry_use_pch(ferry_${name} ferry_pch)
    # What files include is compiled once for all that are joined: a fifth of the time.
    if(NOT WIN32)  # not tried by mingw-w64
      set_target_properties(ferry_${name} PROPERTIES UNITY_BUILD_BATCH_SIZE 24)
    endif()
    # CMake 3.31 and newer would join kernels, too.
    list(FILTER ARG_SOURCES INCLUDE REGEX "[.]cu$")
    set_source_files_properties(${ARG_SOURCES} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  else()
    add_library(ferry_${name} INTERFACE)
    target_link_libraries(ferry_${name} INTERFACE ferry_options Threads::Threads ${ARG_DEPENDS})
  endif()
endfunction()

# The distribution's GoogleTest; when cross-compiling, built from the sources that its package
# brings, because the library is there for this machine only.
macro(ferry_find_gtest)
  if(CMAKE_CROSSCOMPILING AND NOT TARGET GTest::gtest)
    set(BUILD_GMOCK OFF)
    set(INSTALL_GTEST OFF)
    add_subdirectory(/usr/src/googletest ${PROJECT_BINARY_DIR}/googletest EXCLUDE_FROM_ALL)
    target_compile_options(gtest PRIVATE -O0)  # compiles longer than it runs
  elseif(NOT TARGET GTest::gtest)
    find_package(GTest REQUIRED)
  endif()
  if(FERRY_PCH AND NOT TARGET ferry_test_pch)
    ferry_make_pch(ferry_test_pch <gtest/gtest.h>)
    target_link_libraries(ferry_test_pch PRIVATE GTest::gtest)
    # As programs are compiled.
    set_target_properties(ferry_test_pch PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(ferry_test_pch PRIVATE -fPIE ${FERRY_TEST_OPTIONS})
  endif()
endmacro()

# ferry_limit_test(number_test 60): after so many seconds the test counts as hung, in CI. Elsewhere a
# machine may be slow or busy: five times as many.
function(ferry_limit_test name seconds)
  if(NOT "$ENV{CI}" STREQUAL "true")
    math(EXPR seconds "5 * ${seconds}")
  endif()
  set_tests_properties(${name} PROPERTIES TIMEOUT ${seconds})
endfunction()

# A program of GoogleTest, or with NO_GTEST a plain one.
function(ferry_add_test_program name)
  cmake_parse_arguments(ARG "NO_GTEST" "" "SOURCES;POSIX_SOURCES;DEPENDS" ${ARGN})
  if(NOT WIN32)
    list(APPEND ARG_SOURCES ${ARG_POSIX_SOURCES})
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ferry_options ${ARG_DEPENDS})
  if(NOT ARG_NO_GTEST)
    ferry_find_gtest()
    target_link_libraries(${name} PRIVATE GTest::gtest GTest::gtest_main)
    ferry_use_pch(${name} ferry_test_pch)
  endif()
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${FERRY_TEST_OPTIONS}>)
endfunction()

# Registers a command with CTest: the path of a test program, and its arguments. TIMEOUT: 120 unless
# given. COST: about its seconds; the longest starts first.
function(ferry_register_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT;COST" "LABELS;COMMAND" ${ARGN})
  add_test(NAME ${name} COMMAND ${CMAKE_CROSSCOMPILING_EMULATOR} ${ARG_COMMAND})
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}")
  if(ARG_COST)
    set_tests_properties(${name} PROPERTIES COST ${ARG_COST})
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  ferry_limit_test(${name} ${ARG_TIMEOUT})
endfunction()

# ferry_add_test(number_test SOURCES number_test.cpp DEPENDS ferry_core [LABELS core] [TIMEOUT 60]
#   [NO_GTEST] [COST 100])
# A program registered with CTest. Does nothing when tests are off. POSIX_SOURCES: not for Windows;
# POSIX_FILES of ferry_add_tests likewise.
function(ferry_add_test name)
  if(NOT FERRY_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "TIMEOUT;COST" "LABELS;ARGS" ${ARGN})
  if(WIN32 AND NOT "SOURCES" IN_LIST ARG_UNPARSED_ARGUMENTS)
    return()
  endif()
  ferry_add_test_program(${name} ${ARG_UNPARSED_ARGUMENTS})
  ferry_register_test(${name} COMMAND $<TARGET_FILE:${name}> ${ARG_ARGS}
    LABELS "${ARG_LABELS}" TIMEOUT "${ARG_TIMEOUT}" COST "${ARG_COST}")
endfunction()

# ferry_add_tests(host_tests PREFIX host_ FILES latency/masks_test.cpp ... DEPENDS ferry_api
#   [SOURCES helpers.cpp] [LABELS host] [TIMEOUT 60])
# One program of many files, which compiles and links sooner than many programs. CTest runs each file
# by itself, as host_latency_masks_test: the tests of a file are in a process of their own.
function(ferry_add_tests program)
  if(NOT FERRY_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "PREFIX;TIMEOUT" "FILES;POSIX_FILES;SOURCES;DEPENDS;LABELS" ${ARGN})
  if(NOT WIN32)
    list(APPEND ARG_FILES ${ARG_POSIX_FILES})
  endif()
  ferry_add_test_program(${program} DEPENDS ${ARG_DEPENDS}
    SOURCES ${PROJECT_SOURCE_DIR}/cmake/test_main.cpp ${ARG_FILES} ${ARG_SOURCES})
  foreach(file IN LISTS ARG_FILES)
    string(REGEX REPLACE "[.]cpp$" "" name ${file})
    string(REPLACE "/" "_" name ${ARG_PREFIX}${name})
    ferry_register_test(${name} COMMAND $<TARGET_FILE:${program}> ${file}
      LABELS "${ARG_LABELS}" TIMEOUT "${ARG_TIMEOUT}")
  endforeach()
endfunction()
