// Layer 3 of the CUDA primitives: fragments of matrices in the registers of a warp, and their products.
//
// An accumulator is 16 x 8 numbers of float32, 4 in each lane: with group = lane / 4 and pair = lane % 4, number e is
// at row group + 8 (e / 2), column 2 pair + e % 2. A product has operands of 16 x depth and depth x 8.
//
// Contract: a tile that is read along its rows (m or n by the inner dimension) goes through ldmatrix; one that is read
// across them (the inner dimension by m or n) through ldmatrix.trans for 16-bit types. float32 has no such instruction:
// there the inner indices of a step are taken in the order 0 2 4 6 1 3 5 7, in which an accumulator is an operand as it
// stands and plain loads of neighbouring rows have no bank conflicts. Both operands of a product must be of one order.
#pragma once
#include "flashgen/shared_tile.cuh"

namespace fg {

FG_DEVICE int fragment_row(int e) { return lane_index() / 4 + 8 * (e / 2); }
FG_DEVICE int fragment_column(int e) { return lane_index() % 4 * 2 + e % 2; }

template <int m_tiles, int n_tiles> struct Accumulators {
  float at[m_tiles][n_tiles][4];

  // visit(element) for those of row r of a lane's, in the order of their columns; the same by what rows are multiplied by.
  template <class Visit> FG_DEVICE void for_row(int r, const Visit& visit) {
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int e = r % 2 * 2; e < r % 2 * 2 + 2; ++e) visit(at[r / 2][n][e]);
  }
  FG_DEVICE void scale_row(int r, float factor) {
    for_row(r, [factor](float& element) { element *= factor; });
  }
};
template <int m_tiles, int n_tiles> FG_DEVICE void clear(Accumulators<m_tiles, n_tiles>& d) {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) d.at[m][n][e] = 0.0f;
}

template <class T> struct Left {  // 16 x depth
  uint32_t r[4];
};
template <class T> struct Right {  // depth x 8
  uint32_t r[2];
};

// ---- d += a b ------------------------------------------------------------------------------------------------------

FG_DEVICE void multiply(float (&d)[4], const Left<half_t>& a, const Right<half_t>& b) { mma_f16(d, a.r, b.r); }
FG_DEVICE void multiply(float (&d)[4], const Left<bfloat_t>& a, const Right<bfloat_t>& b) { mma_bf16(d, a.r, b.r); }

// x = large + small; large is the nearest tf32 number, of small the matrix units read all bits but the last. Not by
// cvt.rna.tf32, which is four instructions that also care for NaN: that comes out of small.
FG_DEVICE void split(uint32_t x, uint32_t& large, uint32_t& small) {
  large = (x + 0x1000) & 0xffffe000;
  small = __float_as_uint(__uint_as_float(x) - __uint_as_float(large));
}
template <int registers> struct Parts {  // of an operand of float32
  uint32_t large[registers], small[registers];
};
template <int registers> FG_DEVICE Parts<registers> split(const uint32_t (&r)[registers]) {
  Parts<registers> parts;
#pragma unroll
  for (int i = 0; i < registers; ++i) split(r[i], parts.large[i], parts.small[i]);
  return parts;
}
// float32 in three tf32 products; what is left out, small by small, is below float32's rounding. Matrix units cut their
// sums off towards zero, which a long chain of products turns into an error of its own: chains begin at zero, stay
// within a tile, and end with an addition that rounds to nearest.
FG_DEVICE void chain(float (&d)[4], const Parts<4>& a, const Parts<2>& b) {
  mma_tf32(d, a.small, b.large);
  mma_tf32(d, a.large, b.small);
  mma_tf32(d, a.large, b.large);
}
FG_DEVICE void add(float (&d)[4], const float (&sum)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) d[e] += sum[e];
}
FG_DEVICE void multiply(float (&d)[4], const Left<float>& a, const Right<float>& b) {
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  chain(sum, split(a.r), split(b.r));
  add(d, sum);
}

// ---- operands from shared memory ------------------------------------------------------------------------------------

// A square of 2 x 2 matrices of 8 rows by 16 bytes, numbered down the columns or along the rows; (row, column) is its
// corner, `row` a multiple of 8 and `column` of two chunks. Either order has one place a lane in its first square; the
// chunk's number flips bits of it. Callers take `lane` from again(lane_index()), so that these few instructions are
// repeated in every product instead of every address being kept in a register.
enum class Order { down, along };
template <Order order, class Tile> FG_DEVICE char* place_of_square(Tile tile, int row, int column, unsigned lane) {
  constexpr int group = 8 / Tile::row_chunks;  // rows that share 128 bytes
  const unsigned lane_row = order == Order::down ? lane % 16 : lane / 16 * 8 + lane % 8;
  const unsigned lane_chunk = order == Order::down ? lane / 16 : lane / 8 % 2;
  const unsigned in_square = lane_row * Tile::row_chunks * 16 + (lane_chunk ^ lane_row / group % Tile::row_chunks) * 16;
  const int panel = (column / Tile::width * Tile::rows + row) * Tile::row_chunks * 16;
  return reinterpret_cast<char*>(tile.base) + panel + (in_square ^ column % Tile::width / Tile::chunk * 16);
}
template <Order order, bool transposed, class Tile>
FG_DEVICE void load_square(uint32_t (&r)[4], Tile tile, int row, int column, unsigned lane) {
  const char* const address = place_of_square<order>(tile, row, column, lane);
  if constexpr (transposed) load_matrix_x4_transposed(r, address);
  else load_matrix_x4(r, address);
}

// The address of element (row + own_row, column + own_column), `row` and `column` multiples of 8, what is the lane's
// own below 8: one place a lane as well, of which the chunk's number flips bits.
template <class Tile> FG_DEVICE char* place_of(Tile tile, int row, int column, unsigned own_row, unsigned own_column) {
  constexpr int group = 8 / Tile::row_chunks, row_bytes = Tile::row_chunks * 16;
  const unsigned within = own_column * unsigned(sizeof(typename Tile::element));
  const unsigned in_first =
      own_row * row_bytes + ((own_row / group % Tile::row_chunks) ^ within / 16) * 16 + within % 16;
  const int panel = (column / Tile::width * Tile::rows + row) * row_bytes;
  return reinterpret_cast<char*>(tile.base) + panel + (in_first ^ column % Tile::width / Tile::chunk * 16);
}

// Rows row … row + 15 of the tile are rows of A.
template <class Tile> FG_DEVICE auto load_left(Tile tile, int row, int inner, unsigned lane) {
  Left<typename Tile::element> a;
  load_square<Order::down, false>(a.r, tile, row, inner, lane);
  return a;
}
// Rows row … row + 15 of the tile are columns of B: two operands.
template <class Tile>
FG_DEVICE void load_right(Right<typename Tile::element> (&b)[2], Tile tile, int row, int inner, unsigned lane) {
  uint32_t r[4];
  load_square<Order::along, false>(r, tile, row, inner, lane);
  b[0] = {{r[0], r[1]}}, b[1] = {{r[2], r[3]}};
}
// Rows row … row + 7 of the tile are the columns of one B.
template <class Tile>
FG_DEVICE void load_last_right(Right<typename Tile::element>& b, Tile tile, int row, int inner, unsigned lane) {
  static_assert(sizeof(typename Tile::element) == 4, "16-bit operands come in pairs");
#pragma unroll
  for (int i = 0; i < 2; ++i)
    b.r[i] = shared_load(reinterpret_cast<const uint32_t*>(place_of(tile, row, inner, lane / 4, lane % 4 + 4 * i)));
}
// Rows row … row + 15 of the tile are rows of A, for a B that is read across its tile.
template <class Tile> FG_DEVICE auto load_left_for_across(Tile tile, int row, int inner, unsigned lane) {
  using T = typename Tile::element;
  Left<T> a;
  if constexpr (sizeof(T) == 2) {
    load_square<Order::down, false>(a.r, tile, row, inner, lane);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto pair =
          shared_load(reinterpret_cast<const uint2*>(place_of(tile, row + 8 * half, inner, lane / 4, lane % 4 * 2)));
      a.r[half] = pair.x, a.r[half + 2] = pair.y;
    }
  }
  return a;
}
// Columns column … column + 15 of the tile are rows of A.
template <class Tile> FG_DEVICE auto load_left_across(Tile tile, int inner, int column, unsigned lane) {
  using T = typename Tile::element;
  Left<T> a;
  if constexpr (sizeof(T) == 2) {
    load_square<Order::along, true>(a.r, tile, inner, column, lane);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a.r[i] = shared_load(
          reinterpret_cast<const uint32_t*>(place_of(tile, inner, column + i % 2 * 8, lane % 4 * 2 + i / 2, lane / 4)));
  }
  return a;
}
// Columns column … column + 15 of the tile are columns of B: two operands.
template <class Tile>
FG_DEVICE void load_right_across(
    Right<typename Tile::element> (&b)[2], Tile tile, int inner, int column, unsigned lane) {
  using T = typename Tile::element;
  uint32_t r[4];
  if constexpr (sizeof(T) == 2) {
    load_square<Order::down, true>(r, tile, inner, column, lane);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      r[i] = shared_load(
          reinterpret_cast<const uint32_t*>(place_of(tile, inner, column + i / 2 * 8, lane % 4 * 2 + i % 2, lane / 4)));
  }
  b[0] = {{r[0], r[1]}}, b[1] = {{r[2], r[3]}};
}

// ---- operands from accumulators -------------------------------------------------------------------------------------

// Columns step * depth … of a row of accumulators as A; for a B that is read across its tile.
template <class T, int n_tiles> FG_DEVICE Left<T> left_of(const float (&d)[n_tiles][4], int step) {
  if constexpr (sizeof(T) == 2) {
    const auto &low = d[2 * step], &high = d[2 * step + 1];
    return {{Element<T>::pack(low[0], low[1]), Element<T>::pack(low[2], low[3]),
             Element<T>::pack(high[0], high[1]), Element<T>::pack(high[2], high[3])}};
  } else {
    const auto& only = d[step];
    return {{__float_as_uint(only[0]), __float_as_uint(only[2]), __float_as_uint(only[1]), __float_as_uint(only[3])}};
  }
}

// ---- accumulators to shared memory ----------------------------------------------------------------------------------

// Rounds an accumulator to the tile's type and stores it at (row, column), multiples of 8; `lane` as for load_square.
template <class Tile>
FG_DEVICE void store_fragment(Tile tile, int row, int column, const float (&d)[4], unsigned lane) {
  using T = typename Tile::element;
  char* const start = place_of(tile, row, column, lane / 4, lane % 4 * 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    char* const place = start + 8 * half * Tile::row_chunks * 16;
    if constexpr (sizeof(T) == 2) {
      shared_store(reinterpret_cast<uint32_t*>(place), Element<T>::pack(d[2 * half], d[2 * half + 1]));
    } else {
      shared_store(reinterpret_cast<float2*>(place), make_float2(d[2 * half], d[2 * half + 1]));
    }
  }
}

// ---- products ------------------------------------------------------------------------------------------------------

// D += A Bᵀ over the whole inner dimension; A from row `row` of its tile on, B's columns are rows column … of its tile.
template <int m_tiles, int n_tiles, class TileA, class TileB>
FG_DEVICE void product(Accumulators<m_tiles, n_tiles>& d, TileA a, int row, TileB b, int column) {
  using T = typename TileA::element;
  static_assert(TileA::columns == TileB::columns, "operands are of one inner dimension");
  const int lane = again(lane_index());
#pragma unroll Element<T>::unroll
  for (int inner = 0; inner < TileA::columns; inner += Element<T>::depth) {
    Left<T> left[m_tiles];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) left[m] = load_left(a, row + 16 * m, inner, lane);
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2) {
      Right<T> right[2];
      if constexpr (n_tiles % 2 == 0) load_right(right, b, column + 8 * n, inner, lane);
      else if (n + 1 < n_tiles) load_right(right, b, column + 8 * n, inner, lane);
      else load_last_right(right[0], b, column + 8 * n, inner, lane);
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
        multiply(d.at[m][n], left[m], right[0]);
        if (n + 1 < n_tiles) multiply(d.at[m][n + 1], left[m], right[1]);
      }
    }
  }
}

// The operand A of a product that is done many times, kept in registers.
template <class T, int m_tiles, int inner> struct LeftRows {
  static constexpr int steps = inner / Element<T>::depth;
  Left<T> at[m_tiles][steps];
};
template <class T, int m_tiles, int inner, class Tile>
FG_DEVICE void load(LeftRows<T, m_tiles, inner>& a, Tile tile, int row) {
  const int lane = lane_index();
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int step = 0; step < inner / Element<T>::depth; ++step)
      a.at[m][step] = load_left(tile, row + 16 * m, step * Element<T>::depth, lane);
}
template <int m_tiles, int n_tiles, class T, int inner, class TileB>
FG_DEVICE void product(Accumulators<m_tiles, n_tiles>& d, const LeftRows<T, m_tiles, inner>& a, TileB b, int column) {
  static_assert(n_tiles % 2 == 0 && inner == TileB::columns, "operands come in pairs, of one inner dimension");
  const int lane = again(lane_index());
#pragma unroll
  for (int step = 0; step < inner / Element<T>::depth; ++step)
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2) {
      Right<T> right[2];
      load_right(right, b, column + 8 * n, step * Element<T>::depth, lane);
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
        multiply(d.at[m][n], a.at[m][step], right[0]), multiply(d.at[m][n + 1], a.at[m][step], right[1]);
    }
}

// D += P B, P a row of accumulators rounded to B's type; B's rows are the inner dimension, its columns from `column`
// on.
template <int m_tiles, int p_tiles, int n_tiles, class TileB>
FG_DEVICE void product_across(
    Accumulators<m_tiles, n_tiles>& d, const Accumulators<m_tiles, p_tiles>& p, TileB b, int column) {
  using T = typename TileB::element;
  static_assert(n_tiles % 2 == 0 && 8 * p_tiles == TileB::rows, "operands come in pairs, of one inner dimension");
  const int lane = again(lane_index());
  constexpr int steps = 8 * p_tiles / Element<T>::depth;
  if constexpr (sizeof(T) == 4) {  // one chain over all steps
    Parts<4> left[m_tiles][steps];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int step = 0; step < steps; ++step) left[m][step] = split(left_of<T>(p.at[m], step).r);
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2) {
      Accumulators<m_tiles, 2> sums;
      clear(sums);
#pragma unroll
      for (int step = 0; step < steps; ++step) {
        Right<T> right[2];
        load_right_across(right, b, step * Element<T>::depth, column + 8 * n, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const Parts<2> parts = split(right[i].r);
#pragma unroll
          for (int m = 0; m < m_tiles; ++m) chain(sums.at[m][i], left[m][step], parts);
        }
      }
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) add(d.at[m][n], sums.at[m][0]), add(d.at[m][n + 1], sums.at[m][1]);
    }
  } else {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      Left<T> left[m_tiles];
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) left[m] = left_of<T>(p.at[m], step);
#pragma unroll
      for (int n = 0; n < n_tiles; n += 2) {
        Right<T> right[2];
        load_right_across(right, b, step * Element<T>::depth, column + 8 * n, lane);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m)
          multiply(d.at[m][n], left[m], right[0]), multiply(d.at[m][n + 1], left[m], right[1]);
      }
    }
  }
}

// D += Aᵀ B over the rows of both tiles, or A B over A's columns and B's rows; D's rows are columns (or rows) row … of
// A, its columns are columns column … of B.
template <bool transposed = true, int m_tiles, int n_tiles, class TileA, class TileB>
FG_DEVICE void product_across(Accumulators<m_tiles, n_tiles>& d, TileA a, int row, TileB b, int column) {
  using T = typename TileA::element;
  static_assert(n_tiles % 2 == 0 && (transposed ? TileA::rows : TileA::columns) == TileB::rows,
                "operands come in pairs, of one inner dimension");
  const int lane = again(lane_index());
#pragma unroll Element<T>::unroll
  for (int inner = 0; inner < TileB::rows; inner += Element<T>::depth) {
    Left<T> left[m_tiles];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
      if constexpr (transposed) left[m] = load_left_across(a, inner, row + 16 * m, lane);
      else left[m] = load_left_for_across(a, row + 16 * m, inner, lane);
    }
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2) {
      Right<T> right[2];
      load_right_across(right, b, inner, column + 8 * n, lane);
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
        multiply(d.at[m][n], left[m], right[0]), multiply(d.at[m][n + 1], left[m], right[1]);
    }
  }
}

// ---- accumulators to global memory ----------------------------------------------------------------------------------

// Word k of lane l of a quad becomes word l of lane k; `lane` is that within the quad.
FG_DEVICE void transpose_quad(uint32_t (&words)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k & bit) continue;
      const bool upper = lane & bit;
      const uint32_t other = shuffle_xor(upper ? words[k] : words[k + bit], bit);
      words[k] = upper ? other : words[k];
      words[k + bit] = upper ? words[k + bit] : other;
    }
}

enum class Kept { normally, briefly };  // by the last cache

// Stores the rows of accumulators, rounded to T, from row `row` of `width` elements on; there are `count` rows. Of
// 2-byte elements lanes of a quad exchange what they have of four tiles, so that each
// stores 16 bytes.
template <class T, int width, Kept kept = Kept::normally, class To, int n_tiles>
FG_DEVICE void store_fragments(To to, const float (&d)[n_tiles][4], int row, int count) {
  static_assert(width <= 8 * n_tiles, "the accumulators have all columns");
  constexpr int wide = sizeof(T) == 2 && width % 8 == 0 ? width / 32 * 4 : 0;  // tiles that go by fours
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + fragment_row(2 * half);
    T* const place = row_of<width>(to, at);
    if constexpr (wide > 0) {
      const int lane = lane_index() % 4;
#pragma unroll
      for (int t = 0; t < wide; t += 4) {
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = Element<T>::pack(d[t + k][2 * half], d[t + k][2 * half + 1]);
        transpose_quad(words, lane);
        if (at >= count) continue;
        uint4* const four = reinterpret_cast<uint4*>(place + 8 * (t + lane));
        if constexpr (kept == Kept::briefly) global_stream(four, make_uint4(words[0], words[1], words[2], words[3]));
        else global_store(four, make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
#pragma unroll
    for (int t = wide; t < n_tiles; ++t) {
      struct alignas(width % 2 == 0 ? 2 * sizeof(T) : sizeof(T)) Pair {
        T element[2];
      };
      const Pair pair = {{Element<T>::round(d[t][2 * half]), Element<T>::round(d[t][2 * half + 1])}};
      const int column = 8 * t + fragment_column(0);
      if (at >= count || column >= width) continue;
      if constexpr (width % 2 == 0) {
        global_store(reinterpret_cast<Pair*>(place + column), pair);
      } else {
        global_store(place + column, pair.element[0]);
        if (column + 1 < width) global_store(place + column + 1, pair.element[1]);
      }
    }
  }
}

// Adds an accumulator to 128 floats, atomically; number e of lane l has place 32 e + l.
FG_DEVICE void global_add_fragment(float* sums, const float (&d)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) global_add(sums + 32 * e + lane_index(), d[e]);
}

// The largest number up to `most` that divides n.
FG_CONSTEXPR int largest_divisor(int n, int most) {
  int divisor = most < n ? most : n;
  while (n % divisor != 0) --divisor;
  return divisor;
}

}  // namespace fg
