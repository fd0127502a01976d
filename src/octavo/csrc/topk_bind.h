#pragma once

#include <nanobind/nanobind.h>

namespace octavo {

void bind_topk(nanobind::module_& m);

}  // namespace octavo
