# Compiles with the clang of `ziglang` (Python index), which brings headers and stubs of every glibc and
# a static libc++: for programs that run on older systems than this one (tools/wheels).
#   FERRY_ZIG         the program zig
#   FERRY_ZIG_TARGET  e.g. x86_64-linux-gnu.2.28
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES FERRY_ZIG FERRY_ZIG_TARGET)
set(CMAKE_SYSTEM_NAME Linux)
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "${FERRY_ZIG_TARGET}")
set(CMAKE_CXX_COMPILER ${FERRY_ZIG} c++ -target ${FERRY_ZIG_TARGET})
