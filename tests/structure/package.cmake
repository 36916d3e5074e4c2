# SPDX-License-Identifier: Apache-2.0
# Installs the build tree to an empty prefix and builds a small program against it: by find_package, and with the sources as a subproject.
file(REMOVE_RECURSE "${WORK_DIR}")
set(prefix "${WORK_DIR}/prefix")

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\n${output}")
  endif()
endfunction()

function(build_and_run name)
  set(build "${WORK_DIR}/${name}")
  run("${CMAKE_COMMAND}" -S "${SOURCE_DIR}/tests/structure/consumer" -B "${build}" -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${COMPILER}"
    "-DCMAKE_TOOLCHAIN_FILE=${TOOLCHAIN}" "-DEXPECTED_VERSION=${VERSION}" ${ARGN})
  run("${CMAKE_COMMAND}" --build "${build}" --config Debug)
  run("${CMAKE_CTEST_COMMAND}" --test-dir "${build}" -C Debug --output-on-failure --no-tests=error)
endfunction()

run("${CMAKE_COMMAND}" --install "${BUILD_DIR}" --prefix "${prefix}")
file(GLOB_RECURSE kernels "${prefix}/*/kvexact/cuda/*.cuh")
if(NOT kernels)
  message(FATAL_ERROR "the package has no kernels")
endif()
build_and_run(package "-DCMAKE_PREFIX_PATH=${prefix};${DEPENDENCIES}")
build_and_run(subproject "-DCMAKE_PREFIX_PATH=${DEPENDENCIES}" "-DKVEXACT_SOURCE_DIR=${SOURCE_DIR}")
