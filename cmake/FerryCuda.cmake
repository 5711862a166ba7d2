# The compiler of kernels. Code for each architecture that is common, and PTX of one of them ("100",
# without "-real"), which the driver compiles on GPUs that are newer or have no code of their own
# (sm_110). The runtime is linked statically: no toolkit is needed where Ferry runs, and no driver
# where it only loads.
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  set(ferry_choose_architectures ON)
  set(CMAKE_CUDA_ARCHITECTURES 80-real)  # for CMake's own trials of nvcc
endif()
if(NOT DEFINED CMAKE_CUDA_COMPILER_LAUNCHER AND CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
endif()
if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX})
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
endif()
enable_language(CUDA)
if(ferry_choose_architectures)
  set(CMAKE_CUDA_ARCHITECTURES "80-real;90")  # nvcc knows sm_100 since 12.8
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;100;120-real")
  endif()
endif()
set(CMAKE_CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}" CACHE STRING
  "GPU architectures that kernels are compiled for" FORCE)
# CMake 3.25.1 (Debian 12) does not know that nvcc speaks C++20.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_EXTENSIONS OFF)
find_package(CUDAToolkit REQUIRED)
# Bits must equal the host engine's (docs/design.md, Arithmetic): no contraction.
add_library(ferry_cuda_options INTERFACE)
target_compile_options(ferry_cuda_options INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;-lineinfo;-Xcompiler=-Wall,-Wextra,-ffp-contract=off>")
target_link_libraries(ferry_cuda_options INTERFACE CUDA::cudart_static)
