# The CUDA backend: GATEFOLD_CUDA, and add_cuda_backend(TARGET).
#
# Without find_package(CUDAToolkit): the CUDA language alone finds headers and the runtime. That is linked statically, and
# nothing of the driver, so that the result starts on machines without either.
find_program(GATEFOLD_NVCC NAMES $ENV{CUDACXX} nvcc HINTS ${PROJECT_SOURCE_DIR}/.cache/cuda/nvidia/cu13/bin
             PATHS /usr/local/cuda/bin DOC "CUDA compiler")
set(cuda_default OFF)
if(GATEFOLD_NVCC AND CMAKE_CXX_COMPILER_ID STREQUAL GNU AND NOT GATEFOLD_SANITIZE)
  set(cuda_default ON)
endif()
option(GATEFOLD_CUDA "Build the CUDA backend (needs nvcc 13)" ${cuda_default})
if(NOT GATEFOLD_CUDA)
  return()
endif()

set(CMAKE_CUDA_COMPILER ${GATEFOLD_NVCC})
set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
set(CMAKE_CUDA_ARCHITECTURES 90a-real)  # wgmma exists in 90a alone, and there is no PTX to be compiled at start
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc can
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
endif()
set(CMAKE_CUDA_STANDARD 20)

# Linked by name, so that projects without CUDA can link the library.
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
find_library(GATEFOLD_CUDART cudart_static HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} REQUIRED)

# The report of ptxas is kept beside each object, where scripts/check_ptxas finds it.
set(cuda_launcher ${PROJECT_SOURCE_DIR}/cmake/keep_ptxas_report ${CCACHE})

function(add_cuda_backend target)
  file(GLOB cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*.cpp ${PROJECT_SOURCE_DIR}/src/cuda/*.cu)
  list(FILTER cuda_sources EXCLUDE REGEX "/absent\\.cpp$")
  add_library(${target}_cuda OBJECT ${cuda_sources})
  add_cuda_options(${target}_cuda)
  target_include_directories(${target}_cuda PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${target}_cuda PRIVATE fmt::fmt OpenMP::OpenMP_CXX)
  target_link_libraries(${target} PRIVATE ${GATEFOLD_CUDART} rt pthread dl)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_cuda>)
endfunction()

set(GATEFOLD_CUDA_WAIT_NS 0 CACHE STRING "Debugging: kernels that wait longer for other threads fail; 0: no limit")

function(add_cuda_options target)
  if(GATEFOLD_CUDA_WAIT_NS)
    target_compile_definitions(${target} PRIVATE GATEFOLD_CUDA_WAIT_NS=${GATEFOLD_CUDA_WAIT_NS})
  endif()
  set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER "${cuda_launcher}")
  target_include_directories(${target} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  # As on the CPU: no fused multiply-add unless the code says so.
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-O3;--expt-relaxed-constexpr;-fmad=false;-Xptxas=-v;\
-Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers,-ffp-contract=off>")
endfunction()
