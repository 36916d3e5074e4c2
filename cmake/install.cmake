# SPDX-License-Identifier: Apache-2.0
# Headers, and the package that find_package(kvexact) reads. Nothing depends on the architecture, so all of it goes to share/.
include(CMakePackageConfigHelpers)

set(package_dir "${CMAKE_INSTALL_DATADIR}/cmake/kvexact")
set(package_build_dir "${PROJECT_BINARY_DIR}/package")

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/kvexact" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh")
install(TARGETS kvexact EXPORT kvexactTargets)
install(EXPORT kvexactTargets NAMESPACE kvexact:: DESTINATION "${package_dir}")

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/kvexactConfig.cmake.in" "${package_build_dir}/kvexactConfig.cmake"
  INSTALL_DESTINATION "${package_dir}" NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file("${package_build_dir}/kvexactConfigVersion.cmake" COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES "${package_build_dir}/kvexactConfig.cmake" "${package_build_dir}/kvexactConfigVersion.cmake"
  "${PROJECT_SOURCE_DIR}/cmake/FindxxHash.cmake" DESTINATION "${package_dir}")
