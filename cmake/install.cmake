# `cmake --install`: library, headers, package config, command line tool and its shell completion.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/gatefold)

install(TARGETS gatefold EXPORT gatefold)
install(DIRECTORY include/gatefold TYPE INCLUDE)
install(EXPORT gatefold NAMESPACE gatefold:: FILE gatefold-targets.cmake DESTINATION ${package_dir})
write_basic_package_version_file(gatefold-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES cmake/gatefold-config.cmake cmake/FindCBLAS.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/gatefold-config-version.cmake DESTINATION ${package_dir})
install(FILES LICENSE TYPE DOC)
