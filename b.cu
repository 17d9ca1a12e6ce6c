#include <cstdint>
extern "C" __global__ void k(uint32_t* p, uint32_t t){ bool h,l; uint32_t w=p[threadIdx.x]; uint32_t m=__vibmax_u16x2(w,t,&h,&l); p[threadIdx.x+999]=h?p[threadIdx.x+5000]:0;p[threadIdx.x+998]=l?p[threadIdx.x+5001]:0; p[threadIdx.x+7000]=__vcmpgeu2(w,t); }
