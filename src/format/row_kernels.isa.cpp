#include "format/row_kernels.h"

#include "format/rows.h"

namespace gatefold::GATEFOLD_ISA {
namespace {

template <std::size_t I>
constexpr RowKernels::PerFormat per_format() {
  constexpr Format F = formats::all[I].format;
  if constexpr (F.bits <= 16 && (F.is_integer() || F.kind == Kind::floating))
    return {encode_row<F>, decode_row<F>, group_error<F>};
  else
    return {};
}

static_assert(std::size(formats::all) == 11);
constexpr RowKernels kernels{
    widen<formats::f32>,
    widen<formats::f16>,
    widen<formats::bf16>,
    ranges,
    {per_format<0>(), per_format<1>(), per_format<2>(), per_format<3>(), per_format<4>(), per_format<5>(),
     per_format<6>(), per_format<7>(), per_format<8>(), per_format<9>(), per_format<10>()}};

}  // namespace

extern const RowKernels& rows;
const RowKernels& rows = kernels;

}  // namespace gatefold::GATEFOLD_ISA
