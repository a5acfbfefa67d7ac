# hp_isa_unit(family): compiles native/isa/<family>.inc.cpp once per instruction set into namespace hp::<isa>.
# The unit sees HP_ISA (namespace name) and HP_VW (fp32 lanes per vector).
function(hp_isa_object family isa lanes)
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
include(CheckCXXCompilerFlag)
check_cxx_compiler_flag("-mamx-tile -mamx-bf16 -mamx-int8" HP_COMPILER_HAS_AMX)

function(hp_isa_unit family)
  hp_isa_object(${family} baseline 4 ${HP_OPTIMISE} -ffp-contract=fast)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND NOT HARDPOINT_PORTABLE)
    hp_isa_object(${family} avx2 8 ${HP_OPTIMISE} -ffp-contract=fast -march=x86-64-v3)
    hp_isa_object(${family} avx512 16 ${HP_OPTIMISE} -ffp-contract=fast -march=x86-64-v4 -mprefer-vector-width=512
      ${HP_AVX512_QUIET})
    if(family IN_LIST HP_VNNI_FAMILIES)
      hp_isa_object(${family} avx512vnni 16 ${HP_OPTIMISE} -ffp-contract=fast -march=x86-64-v4 -mavx512vnni -mprefer-vector-width=512
        ${HP_AVX512_QUIET})
    else()
      hp_isa_object(${family} avx512bf16 16 ${HP_OPTIMISE} -ffp-contract=fast -march=x86-64-v4 -mavx512bf16 -mavx512vnni -mprefer-vector-width=512
        ${HP_AVX512_QUIET})
    endif()
    target_compile_definitions(_native PRIVATE HP_HAVE_X86_ISAS=1)
    if(HP_COMPILER_HAS_AMX)
      target_compile_definitions(_native PRIVATE HP_HAVE_AMX=1)
      if(family IN_LIST HP_AMX_FAMILIES)
        hp_isa_object(${family} amx 16 ${HP_OPTIMISE} -ffp-contract=fast -march=x86-64-v4 -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16 -mamx-int8
          -mprefer-vector-width=512 ${HP_AVX512_QUIET})
      endif()
    endif()
  endif()
endfunction()

file(GLOB ISA_FAMILIES CONFIGURE_DEPENDS native/isa/*.inc.cpp)
foreach(path ${ISA_FAMILIES})
  get_filename_component(family "${path}" NAME)
  string(REPLACE ".inc.cpp" "" family "${family}")
  hp_isa_unit(${family})
endforeach()
