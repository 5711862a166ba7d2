# What is installed: one library target, ferry::ferry, made of the objects of every folder below the
# API; the public headers; what find_package(ferry) needs; the command line, when it is built.
include(CMakePackageConfigHelpers)

# Walks from a target of ours through what it links to. Our own targets' objects go into
# FERRY_OBJECTS, the libraries of others into FERRY_OUTSIDE.
set(FERRY_SEEN)
set(FERRY_OBJECTS)
set(FERRY_OUTSIDE)
function(ferry_collect target)
  if(target IN_LIST FERRY_SEEN)
    return()
  endif()
  list(APPEND FERRY_SEEN ${target})
  get_target_property(type ${target} TYPE)
  set(links)
  if(NOT type STREQUAL "INTERFACE_LIBRARY")
    list(APPEND FERRY_OBJECTS $<TARGET_OBJECTS:${target}>)
    get_target_property(links ${target} LINK_LIBRARIES)
  else()
    get_target_property(links ${target} INTERFACE_LINK_LIBRARIES)
  endif()
  foreach(link IN LISTS links)
    if(link MATCHES "^ferry_")
      ferry_collect(${link})
    elseif(link)
      list(APPEND FERRY_OUTSIDE ${link})
    endif()
  endforeach()
  return(PROPAGATE FERRY_SEEN FERRY_OBJECTS FERRY_OUTSIDE)
endfunction()
foreach(folder IN ITEMS api host cuda engine bootstrap fabric protocol core base platform)
  if(TARGET ferry_${folder})
    ferry_collect(ferry_${folder})
  endif()
endforeach()
list(REMOVE_DUPLICATES FERRY_OUTSIDE)

# Which find_package the installed target needs of its user, and which libraries users of pkg-config link.
set(FERRY_DEPENDENCIES "")
set(FERRY_PC_LIBS "")
foreach(library IN LISTS FERRY_OUTSIDE)
  if(library STREQUAL "Threads::Threads")
    string(APPEND FERRY_DEPENDENCIES "find_dependency(Threads)\n")
    string(APPEND FERRY_PC_LIBS " -pthread")
  elseif(library MATCHES "^fmt::fmt")
    string(APPEND FERRY_DEPENDENCIES "find_dependency(fmt)\n")
  elseif(library MATCHES "^CUDA::")
    string(APPEND FERRY_DEPENDENCIES "find_dependency(CUDAToolkit)\n")
    string(REPLACE "CUDA::" " -l" name ${library})
    string(APPEND FERRY_PC_LIBS " -L${CUDAToolkit_LIBRARY_DIR}${name}")
  elseif(library MATCHES "^(rt|dl|m|pthread|atomic|ws2_32|bcrypt|advapi32)$" OR library MATCHES "CMAKE_DL_LIBS")
    if(library MATCHES "^[a-z0-9_]+$")  # the system's own: nothing to find
      string(APPEND FERRY_PC_LIBS " -l${library}")
    endif()
  else()
    message(FATAL_ERROR "cmake/FerryInstall.cmake: the library links to '${library}'; "
      "say here which find_package its users need for it")
  endif()
endforeach()

# Static: no symbols to export, no search path at run time, one file to carry.
add_library(ferry_library STATIC ${FERRY_OBJECTS})
add_library(ferry::ferry ALIAS ferry_library)
set_target_properties(ferry_library PROPERTIES
  OUTPUT_NAME ferry EXPORT_NAME ferry LINKER_LANGUAGE CXX
  ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
target_compile_features(ferry_library INTERFACE cxx_std_20)
target_link_libraries(ferry_library PRIVATE ${FERRY_OUTSIDE})
target_include_directories(ferry_library INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/ferry)
install(TARGETS ferry_library EXPORT ferryTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ferry DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.hpp")
install(EXPORT ferryTargets NAMESPACE ferry:: DESTINATION ${package_folder})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/ferryConfig.cmake.in
  ${PROJECT_BINARY_DIR}/ferryConfig.cmake INSTALL_DESTINATION ${package_folder}
  NO_SET_AND_CHECK_MACRO)
# Before 1.0 a new minor version may change the API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/ferryConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/ferryConfig.cmake ${PROJECT_BINARY_DIR}/ferryConfigVersion.cmake
  DESTINATION ${package_folder})
file(RELATIVE_PATH FERRY_PC_UP /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(${PROJECT_SOURCE_DIR}/cmake/ferry.pc.in ${PROJECT_BINARY_DIR}/ferry.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/ferry.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
