#pragma once

#include <nanobind/nanobind.h>

namespace octavo {

void bind_layer(nanobind::module_& m);

}  // namespace octavo
