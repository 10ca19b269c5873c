set(GRADWIRE_CUDA_KERNELS
  bf16 fp16 inceptionn int8 onebit qsgd raw stc stoch3 terngrad three_lc topk)
list(TRANSFORM GRADWIRE_CUDA_KERNELS REPLACE "(.+)" "${PROJECT_SOURCE_DIR}/src/cuda/\\1.cu")
set(GRADWIRE_CUDA_SOURCES ${PROJECT_SOURCE_DIR}/src/cuda/bucket_codec.cc ${GRADWIRE_CUDA_KERNELS})
