// Adds a part of the keys to what rows have seen so far: a warp a row. flashgen/distributed/partial.py says what the fields are.
//   lse = c top + log      lse = log Σ exp(p lse') / p      o = Σ exp(lse' - lse) o'      p: the power of a denominator that is a plain sum
// The first part of a row has o already; then lse is all that there is to do.
#include "flashgen/instructions.cuh"
#include "flashgen/updates.cuh"

struct AddPart {
  float* o;
  const float* part_o;  // null: of the first part
  double *log, *top;
  const float* part_lse;
  const float2* extremes;  // of scores, with what lse cannot hold of them; null where there are none
  int64_t heads, rows, o_by_head, log_by_head;
  double factor, degree;  // of an extreme score, to an exponent in base 2; p
  int width, padding;
};

extern "C" __global__ void __launch_bounds__(256) fg_add_part(const __grid_constant__ AddPart a) {
  const int64_t row = int64_t(fg::block_index()) * 8 + fg::warp_index();
  if (row >= a.heads * a.rows) return;
  const int64_t head = row / a.rows, n = row - head * a.rows, at = head * a.log_by_head + n;
  const int lane = fg::lane_index();
  float kept = 0.0f, added = 0.0f;
  if (lane == 0) {
    constexpr double LN_2 = 0.693147180559945309417;
    double log = fg::global_load(a.part_lse + row), top = 0.0;
    if (a.extremes) {
      const float2 far = fg::global_load(a.extremes + row);
      if (far.x != 0.0f || far.y != 0.0f) top = far.x, log = far.y * LN_2;
    }
    if (a.part_o) {
      const double before = fg::global_read(a.log + at), before_top = fg::global_read(a.top + at);
      // Of two parts without keys none is left.
      if (!(before == -INFINITY && log == -INFINITY)) {
        // Never by lse itself: that of equal tops cancels, however large they are.
        const double ahead = (top - before_top) * (a.factor * LN_2) + (log - before);
        const double grown = log1p(exp(-a.degree * fabs(ahead))) / a.degree;
        const float most = float(exp(-grown)), least = float(exp(-fabs(ahead) - grown));
        if (ahead > 0.0) {
          kept = least, added = most;
          fg::global_store(a.log + at, log + grown);
          fg::global_store(a.top + at, top);
        } else {
          kept = most, added = least;
          fg::global_store(a.log + at, before + grown);
        }
      }
    } else {
      fg::global_store(a.log + at, log);
      fg::global_store(a.top + at, top);
    }
  }
  if (!a.part_o) return;
  kept = fg::shuffle(kept, 0), added = fg::shuffle(added, 0);
  float* const o = a.o + head * a.o_by_head + n * a.width;
  const float* const more = a.part_o + row * a.width;
  if (a.width % 4 == 0) {
    for (int column = 4 * lane; column < a.width; column += 128) {
      float4* const place = reinterpret_cast<float4*>(o + column);
      const float4 x = fg::global_read(place), y = fg::global_load(reinterpret_cast<const float4*>(more + column));
      fg::global_store(place, make_float4(x.x * kept + y.x * added, x.y * kept + y.y * added, x.z * kept + y.z * added, x.w * kept + y.w * added));
    }
    return;
  }
  for (int column = lane; column < a.width; column += 32)
    fg::global_store(o + column, fg::global_read(o + column) * kept + fg::global_load(more + column) * added);
}
