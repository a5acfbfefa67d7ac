# Instruction sets to build: what runs is chosen at run time among those that are linked.
set(HP_ISAS baseline)
include(CheckCXXCompilerFlag)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND NOT HARDPOINT_PORTABLE)
  list(APPEND HP_ISAS avx2 avx512 avx512vnni avx512bf16)
  check_cxx_compiler_flag("-mamx-tile -mamx-bf16 -mamx-int8" HP_COMPILER_HAS_AMX)
  if(HP_COMPILER_HAS_AMX)
    list(APPEND HP_ISAS amx)
  endif()
  if(HARDPOINT_NATIVE AND EXISTS /proc/cpuinfo)
    file(STRINGS /proc/cpuinfo flags REGEX "^flags" LIMIT_COUNT 1)
    foreach(isa_and_flag avx2,avx2 avx512,avx512f avx512vnni,avx512_vnni avx512bf16,avx512_bf16 amx,amx_tile)
      string(REPLACE "," ";" isa_and_flag ${isa_and_flag})
      list(GET isa_and_flag 0 isa)
      list(GET isa_and_flag 1 flag)
      if(NOT flags MATCHES " ${flag}( |$)")
        list(REMOVE_ITEM HP_ISAS ${isa})
      endif()
    endforeach()
  endif()
endif()

# hp_isa_unit(family): compiles native/isa/<family>.inc.cpp once per instruction set into namespace hp::<isa>.
# The unit sees HP_ISA (namespace name) and HP_VW (fp32 lanes per vector).
function(hp_isa_object family isa lanes)
  if(NOT isa IN_LIST HP_ISAS)
    return()
  endif()
  set(unit "${CMAKE_CURRENT_BINARY_DIR}/${family}_${isa}.cpp")
  file(WRITE "${unit}.in" "#include \"isa/${family}.inc.cpp\"\n")
  configure_file("${unit}.in" "${unit}" COPYONLY)
  set_source_files_properties("${unit}" PROPERTIES
    COMPILE_OPTIONS "${ARGN}" COMPILE_DEFINITIONS "HP_ISA=${isa};HP_VW=${lanes}"
    OBJECT_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/native/isa/${family}.inc.cpp")
  target_sources(_native PRIVATE "${unit}")
endfunction()

# GCC 12's own AVX-512 intrinsics trip -Wmaybe-uninitialized (its bug 105593).
set(HP_AVX512_QUIET "")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(HP_AVX512_QUIET -Wno-maybe-uninitialized)
endif()

# Builds with sanitizers, and debug builds, have the level of the rules and of their type.
set(HP_OPTIMISE -O3)
if(HARDPOINT_SANITIZE OR CMAKE_BUILD_TYPE STREQUAL "Debug")
  set(HP_OPTIMISE "")
endif()

# Families that gain by AMX; at that level the others run their kernels for avx512bf16 (isa.hpp).
set(HP_AMX_FAMILIES attention block_gemm gemm)
# Those that gain by AVX512-VNNI and not by AVX512-BF16, which includes it; at the level avx512vnni the others run their kernels for avx512.
set(HP_VNNI_FAMILIES block_gemm)

function(hp_isa_unit family)
  set(options ${HP_OPTIMISE} -ffp-contract=fast)
  set(avx512 -march=x86-64-v4 -mprefer-vector-width=512 ${HP_AVX512_QUIET})
  hp_isa_object(${family} baseline 4 ${options})
  hp_isa_object(${family} avx2 8 ${options} -march=x86-64-v3)
  hp_isa_object(${family} avx512 16 ${options} ${avx512})
  if(family IN_LIST HP_VNNI_FAMILIES)
    hp_isa_object(${family} avx512vnni 16 ${options} ${avx512} -mavx512vnni)
  else()
    hp_isa_object(${family} avx512bf16 16 ${options} ${avx512} -mavx512bf16 -mavx512vnni)
  endif()
  if(family IN_LIST HP_AMX_FAMILIES)
    hp_isa_object(${family} amx 16 ${options} ${avx512} -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16 -mamx-int8)
  endif()
endfunction()

file(GLOB ISA_FAMILIES CONFIGURE_DEPENDS native/isa/*.inc.cpp)
foreach(path ${ISA_FAMILIES})
  get_filename_component(family "${path}" NAME)
  string(REPLACE ".inc.cpp" "" family "${family}")
  hp_isa_unit(${family})
endforeach()
