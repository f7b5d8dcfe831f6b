# CBLAS::CBLAS: OpenBLAS built with OpenMP if there is one, so that its threads and ours are the same pool;
# else any BLAS that comes with cblas.h.
find_path(CBLAS_INCLUDE_DIR cblas.h
          PATH_SUFFIXES ${CMAKE_LIBRARY_ARCHITECTURE}/openblas-openmp openblas-openmp openblas)
find_library(CBLAS_LIBRARY openblas PATH_SUFFIXES openblas-openmp)
if(NOT CBLAS_LIBRARY)
  find_package(BLAS QUIET)
  set(CBLAS_LIBRARY ${BLAS_LIBRARIES})
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CBLAS REQUIRED_VARS CBLAS_LIBRARY CBLAS_INCLUDE_DIR)

if(CBLAS_FOUND AND NOT TARGET CBLAS::CBLAS)
  list(GET CBLAS_LIBRARY 0 cblas_file)
  file(REAL_PATH ${cblas_file} cblas_file)
  if(NOT cblas_file MATCHES "openmp")
    message(WARNING "${cblas_file} is not the OpenMP flavour of OpenBLAS: its threads will compete with "
                    "Gatefold's own (Debian: libopenblas-openmp-dev)")
  endif()
  add_library(CBLAS::CBLAS INTERFACE IMPORTED)
  target_include_directories(CBLAS::CBLAS INTERFACE ${CBLAS_INCLUDE_DIR})
  target_link_libraries(CBLAS::CBLAS INTERFACE ${CBLAS_LIBRARY})
endif()
