// SPDX-License-Identifier: Apache-2.0
#pragma once

// CMake reads the version from these three lines; they are the only place where it is written.
#define KVEXACT_VERSION_MAJOR 0
#define KVEXACT_VERSION_MINOR 1
#define KVEXACT_VERSION_PATCH 0
